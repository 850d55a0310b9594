{{/* Envoy's configuration. Each request goes to the picker beside it, and then to the worker that the picker named. */}}
{{- define "kvrouter.envoyConfig" -}}
{{- $envoy := .Values.envoy -}}
admin:
  address:
    socket_address: {address: 127.0.0.1, port_value: 19000}
static_resources:
  listeners:
    - name: clients
      address:
        socket_address: {address: 0.0.0.0, port_value: 8081}
      per_connection_buffer_limit_bytes: 1048576
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                codec_type: AUTO
                stream_idle_timeout: {{ $envoy.idleTimeout }}
                # A client's own id is kept, and the picker makes one where there is none.
                generate_request_id: false
                preserve_external_request_id: true
                common_http_protocol_options: {idle_timeout: 3600s}
                drain_timeout: 5s
                # Only the picker names workers.
                early_header_mutation_extensions:
                  - name: envoy.http.early_header_mutation.header_mutation
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
                      mutations:
                        - remove: x-gateway-destination-endpoint
                        - remove: x-gateway-destination-endpoint-subset
                http_filters:
                  # Shows the picker the answer's first bytes, and some answers to their end. Nothing waits for it.
                  - name: kvrouter.observer
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service:
                        envoy_grpc: {cluster_name: picker}
                      observability_mode: true
                      deferred_close_timeout: 0.5s
                      failure_mode_allow: true
                      allow_content_length_header: true
                      metadata_options:
                        forwarding_namespaces: {untyped: [kvrouter]}
                      processing_mode:
                        request_header_mode: SKIP
                        response_header_mode: SKIP
                        response_body_mode: STREAMED
                  # Asks the picker where a request goes.
                  - name: envoy.filters.http.ext_proc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service:
                        envoy_grpc: {cluster_name: picker}
                      failure_mode_allow: false
                      status_on_error: {code: ServiceUnavailable}
                      message_timeout: {{ $envoy.pickerTimeout }}
                      allow_content_length_header: true
                      metadata_options:
                        receiving_namespaces: {untyped: [envoy.lb, kvrouter]}
                      response_attributes: [response.code_details, upstream.address]
                      processing_mode:
                        request_header_mode: SEND
                        request_body_mode: FULL_DUPLEX_STREAMED
                        request_trailer_mode: SEND
                        response_header_mode: SEND
                        # Bytes of answers do not pass the picker. Because trailers might come, Envoy keeps the stream
                        # open until the answer is over.
                        response_body_mode: NONE
                        response_trailer_mode: SEND
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                route_config:
                  name: workers
                  virtual_hosts:
                    - name: workers
                      domains: ["*"]
                      routes:
                        - match: {prefix: /}
                          route:
                            cluster: workers
                            timeout: 0s
                            idle_timeout: {{ $envoy.idleTimeout }}
                            # A worker may have closed an idle connection: nothing of the request had an effect yet.
                            retry_policy: {retry_on: "connect-failure,reset-before-request", num_retries: 1}
          {{- if .Values.secrets.tls }}
          transport_socket:
            name: envoy.transport_sockets.tls
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
              common_tls_context:
                alpn_protocols: [h2, http/1.1]
                tls_certificates:
                  - certificate_chain: {filename: /etc/kvrouter/tls/tls.crt}
                    private_key: {filename: /etc/kvrouter/tls/tls.key}
          {{- end }}
    # What the kubelet and Prometheus may see of the admin interface.
    - name: status
      address:
        socket_address: {address: 0.0.0.0, port_value: 19001}
      ignore_global_conn_limit: true
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: status
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                route_config:
                  name: status
                  virtual_hosts:
                    - name: status
                      domains: ["*"]
                      routes:
                        - match: {path: /ready}
                          route: {cluster: admin}
                        - match: {path: /stats/prometheus}
                          route: {cluster: admin}
  clusters:
    - name: workers
      type: ORIGINAL_DST
      lb_policy: CLUSTER_PROVIDED
      connect_timeout: {{ $envoy.connectTimeout }}
      original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          # Engines' servers close what is idle for 5 s: it is closed here before.
          common_http_protocol_options: {idle_timeout: 4s}
          explicit_http_config: {http_protocol_options: {}}
      circuit_breakers:
        thresholds:
          - {max_connections: {{ int $envoy.maxConnections }}, max_pending_requests: {{ int $envoy.maxConnections }}, max_requests: {{ int $envoy.maxConnections }}}
    - name: picker
      type: STATIC
      connect_timeout: 1s
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            http2_protocol_options: {max_concurrent_streams: {{ int $envoy.maxConnections }}}
      circuit_breakers:
        thresholds:
          - {max_connections: {{ int $envoy.maxConnections }}, max_pending_requests: {{ int $envoy.maxConnections }}, max_requests: {{ int $envoy.maxConnections }}}
      load_assignment:
        cluster_name: picker
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address: {address: 127.0.0.1, port_value: {{ .Values.picker.port }}}
    - name: admin
      type: STATIC
      connect_timeout: 1s
      load_assignment:
        cluster_name: admin
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address: {address: 127.0.0.1, port_value: 19000}
overload_manager:
  resource_monitors:
    - name: envoy.resource_monitors.global_downstream_max_connections
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
        max_active_downstream_connections: {{ int $envoy.maxConnections }}
{{- end -}}
