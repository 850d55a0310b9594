{{/* What router, picker and indexer share: settings, secrets, volumes. */}}

{{- define "kvrouter.workerSelector" -}}
{{- $own := printf "app.kubernetes.io/name=%s,app.kubernetes.io/instance=%s,app.kubernetes.io/component=worker" (include "kvrouter.name" .) .Release.Name -}}
{{- .Values.discovery.selector | default $own -}}
{{- end -}}

{{/* The settings file: what the chart knows, and `config` over it. */}}
{{- define "kvrouter.settings" -}}
{{- $server := dict "host" "0.0.0.0" "port" 8080 "drain_seconds" 10 -}}
{{- if .Values.secrets.tls -}}
{{- $server = merge $server (dict "certificate" "/etc/kvrouter/tls/tls.crt" "key" "/etc/kvrouter/tls/tls.key") -}}
{{- end -}}
{{- $settings := dict "server" $server "replicas" (dict "prefix" (printf "%s/%s" .Release.Namespace (include "kvrouter.fullname" .))) -}}
{{- $discovery := .Values.discovery -}}
{{- if ne $discovery.mode "none" -}}
{{- $kubernetes := dict "port" (int $discovery.port) "namespace" $discovery.namespace -}}
{{- if eq $discovery.mode "service" -}}
{{- $_ := set $kubernetes "service" ($discovery.service | default (printf "%s-workers" (include "kvrouter.fullname" .))) -}}
{{- else -}}
{{- $_ := set $kubernetes "selector" (include "kvrouter.workerSelector" .) -}}
{{- end -}}
{{- $_ := set $settings "kubernetes" $kubernetes -}}
{{- end -}}
{{- if .Values.secrets.curve.name -}}
{{- $_ := set $settings "events" (dict "curve_secret_key_file" "/etc/kvrouter/curve/router.key_secret") -}}
{{- end -}}
{{- with .Values.pool -}}{{- if .address -}}
{{- $_ := set $settings "pools" (list (dict "name" "pool" "type" "mooncake" "master" .http "events" .events "models" .models "objects" (int .objects))) -}}
{{- end -}}{{- end -}}
{{- if .Values.secrets.upstreamTls -}}
{{- $_ := set $settings "upstream" (dict "ca" "/etc/kvrouter/upstream/ca.crt") -}}
{{- end -}}
{{- /* Workers that there may be none of: their requests wait for the first. */}}
{{- range .Values.workers -}}
{{- $worker := mergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy .) -}}
{{- if $worker.keda.enabled -}}
{{- $longest := max (int (dig "admission" "cold_start_timeout" 0 $settings)) (int $worker.keda.coldStartTimeout) -}}
{{- $_ := set $settings "admission" (dict "cold_start_timeout" $longest) -}}
{{- $models := $settings.models | default dict -}}
{{- $_ := set $models (include "kvrouter.servedModel" $worker) dict -}}
{{- $_ := set $settings "models" $models -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.config)) -}}
{{- end -}}

{{/* What restarts the routers when it changes: the settings, and custom policies. */}}
{{- define "kvrouter.checksum" -}}
{{ include "kvrouter.settings" . }}{{ with .Values.policies }}{{ toYaml . }}{{ end }}
{{- end -}}

{{/* Seconds from SIGTERM to the end of the last request, and ten more. */}}
{{- define "kvrouter.stopSeconds" -}}
{{- $server := .Values.config.server | default dict -}}
{{- add (int (dig "drain_seconds" 10 $server)) (int (dig "shutdown_timeout" 30 $server)) 10 -}}
{{- end -}}

{{/* The Secret with the operator's token; empty: there is no token. */}}
{{- define "kvrouter.adminTokenSecret" -}}
{{- with .Values.secrets.adminToken -}}
{{- .name | default (ternary (printf "%s-token" (include "kvrouter.fullname" $)) "" .create) -}}
{{- end -}}
{{- end -}}

{{/* The operator's port, which is the port of clients too where `config.server.admin_port` names no other. */}}
{{- define "kvrouter.adminPort" -}}
{{- $server := .Values.config.server | default dict -}}
{{- int ($server.admin_port | default $server.port | default 8080) -}}
{{- end -}}

{{/* Whether there is an operator's port beside that of clients. */}}
{{- define "kvrouter.hasAdminPort" -}}
{{- with .Values.config.server }}{{ with .admin_port }}yes{{ end }}{{ end -}}
{{- end -}}

{{/* The router's service for operators, and its port. */}}
{{- define "kvrouter.adminService" -}}
{{- $router := printf "%s-router" (include "kvrouter.fullname" .) -}}
{{- $plain := printf "%s.%s.svc:%v" $router .Release.Namespace .Values.router.service.port -}}
{{- $own := printf "%s-admin.%s.svc:%s" $router .Release.Namespace (include "kvrouter.adminPort" .) -}}
{{- ternary $own $plain (eq (include "kvrouter.hasAdminPort" .) "yes") -}}
{{- end -}}

{{/* Where a new replica reads another's index. Over https the service's name would have to be in the certificate. */}}
{{- define "kvrouter.peerUrl" -}}
{{- if and .Values.router.enabled .Values.router.peer (not .Values.secrets.tls) (not (dig "index" "peer" "" .Values.config)) -}}
http://{{ include "kvrouter.adminService" . }}
{{- end -}}
{{- end -}}

{{/* Secrets as environment variables: the settings' own names. */}}
{{- define "kvrouter.secretSettings" -}}
{{- with include "kvrouter.adminTokenSecret" . }}
{{ include "kvrouter.secretEnv" (list "KVROUTER_SERVER__TOKEN" (dict "name" . "key" $.Values.secrets.adminToken.key)) }}
{{- end }}
{{- with .Values.secrets.indexSecret }}{{- if .name }}
{{ include "kvrouter.secretEnv" (list "KVROUTER_INDEX__SECRET" .) }}
{{- end }}{{- end }}
{{- with .Values.secrets.tenants }}{{- if .name }}
{{ include "kvrouter.secretEnv" (list "KVROUTER_TENANTS__NAMED" .) }}
{{- end }}{{- end }}
{{- with .Values.secrets.workerApiKey }}{{- if .name }}
{{ include "kvrouter.secretEnv" (list "KVROUTER_FLEET__API_KEY" .) }}
{{- end }}{{- end }}
{{- with .Values.secrets.huggingFaceToken }}{{- if .name }}
{{ include "kvrouter.secretEnv" (list "HF_TOKEN" .) }}
{{- end }}{{- end }}
{{- if .Values.redis.existingSecret.name }}
{{ include "kvrouter.secretEnv" (list "KVROUTER_REPLICAS__REDIS" .Values.redis.existingSecret) }}
{{- else if .Values.redis.enabled }}
- name: KVROUTER_REPLICAS__REDIS
  value: redis://{{ include "kvrouter.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- end }}
{{- end -}}

{{/* Environment of a container: dict of root, pod, snapshot and peer (URL). */}}
{{- define "kvrouter.environment" -}}
env:
  - {name: HF_HOME, value: /var/cache/kvrouter}
  - {name: XDG_CACHE_HOME, value: /var/cache}
  - {name: TMPDIR, value: /tmp}
  {{- if .root.Values.policies }}
  - {name: PYTHONPATH, value: /etc/kvrouter/policies}
  {{- end }}
  {{- if and .snapshot (or (eq .snapshot "indexer.snapshot") (not (dig "index" "snapshot" "" .root.Values.config))) }}
  - {name: KVROUTER_INDEX__SNAPSHOT, value: /var/lib/kvrouter/{{ .snapshot }}}
  {{- end }}
  {{- with .peer }}
  - {name: KVROUTER_INDEX__PEER, value: {{ . | quote }}}
  {{- end }}
  {{- with include "kvrouter.secretSettings" .root | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .pod.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .pod.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvrouter.mounts" -}}
volumeMounts:
  - {name: config, mountPath: /etc/kvrouter/config, readOnly: true}
  - {name: cache, mountPath: /var/cache/kvrouter}
  - {name: state, mountPath: /var/lib/kvrouter}
  - {name: tmp, mountPath: /tmp}
  {{- if .root.Values.policies }}
  - {name: policies, mountPath: /etc/kvrouter/policies, readOnly: true}
  {{- end }}
  {{- if .root.Values.secrets.tls }}
  - {name: tls, mountPath: /etc/kvrouter/tls, readOnly: true}
  {{- end }}
  {{- if .root.Values.secrets.curve.name }}
  - {name: curve, mountPath: /etc/kvrouter/curve, readOnly: true}
  {{- end }}
  {{- if .root.Values.secrets.upstreamTls }}
  - {name: upstream, mountPath: /etc/kvrouter/upstream, readOnly: true}
  {{- end }}
  {{- with .pod.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Volumes of a pod: dict of root, pod and state (a claim, or empty). */}}
{{- define "kvrouter.volumes" -}}
{{- $values := .root.Values -}}
- name: config
  configMap:
    name: {{ include "kvrouter.fullname" .root }}-config
- name: cache
  {{- if $values.router.tokenizerCache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ $values.router.tokenizerCache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $values.router.tokenizerCache.sizeLimit }}
  {{- end }}
- name: state
  {{- if .state }}
  persistentVolumeClaim:
    claimName: {{ .state }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $values.router.snapshot.sizeLimit }}
  {{- end }}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- if $values.policies }}
- name: policies
  configMap:
    name: {{ include "kvrouter.fullname" .root }}-policies
{{- end }}
{{- if $values.secrets.tls }}
- name: tls
  secret: {secretName: {{ $values.secrets.tls }}, defaultMode: 0440}
{{- end }}
{{- with $values.secrets.curve }}{{- if .name }}
- name: curve
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: router.key_secret}
{{- end }}{{- end }}
{{- if $values.secrets.upstreamTls }}
- name: upstream
  secret: {secretName: {{ $values.secrets.upstreamTls }}, defaultMode: 0440}
{{- end }}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A probe, over https where the router speaks it: list of root and probe. */}}
{{- define "kvrouter.probe" -}}
{{- $probe := deepCopy (index . 1) -}}
{{- if and (index . 0).Values.secrets.tls (hasKey $probe "httpGet") -}}
{{- $_ := set $probe.httpGet "scheme" "HTTPS" -}}
{{- end -}}
{{- toYaml $probe -}}
{{- end -}}

{{/* The indexer's container: list of root and pod. */}}
{{- define "kvrouter.indexerContainer" -}}
{{- $root := index . 0 -}}
{{- $pod := index . 1 -}}
{{- $indexer := $root.Values.indexer -}}
- name: indexer
  image: {{ include "kvrouter.image" (list $root.Values.image $root.Chart.AppVersion) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args: [indexer, --config, /etc/kvrouter/config/config.yaml, --host, 0.0.0.0, --port, {{ $indexer.port | quote }}, --log-level, {{ $root.Values.logLevel }}]
  securityContext:
    {{- toYaml $pod.containerSecurityContext | nindent 4 }}
  {{- include "kvrouter.environment" (dict "root" $root "pod" $pod "snapshot" "indexer.snapshot" "peer" "") | nindent 2 }}
  ports:
    - {name: index, containerPort: {{ $indexer.port }}}
  {{- range $name, $period := dict "startupProbe" 2 "livenessProbe" 10 "readinessProbe" 5 }}
  {{ $name }}:
    {{- include "kvrouter.probe" (list $root (dict "httpGet" (dict "path" "/health" "port" "index") "periodSeconds" $period "failureThreshold" (ternary 60 6 (eq $name "startupProbe")) "timeoutSeconds" 5)) | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml $indexer.resources | nindent 4 }}
  {{- include "kvrouter.mounts" (dict "root" $root "pod" $pod) | nindent 2 }}
{{- end -}}

{{/* The picker's container: list of root, pod and the seconds before SIGTERM. */}}
{{- define "kvrouter.pickerContainer" -}}
{{- $root := index . 0 -}}
{{- $pod := index . 1 -}}
{{- $picker := $root.Values.picker -}}
- name: picker
  image: {{ include "kvrouter.image" (list $root.Values.image $root.Chart.AppVersion) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args:
    - picker
    - --config
    - /etc/kvrouter/config/config.yaml
    - --grpc-port
    - {{ $picker.port | quote }}
    - --log-level
    - {{ $root.Values.logLevel }}
    {{- range $picker.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  securityContext:
    {{- toYaml $pod.containerSecurityContext | nindent 4 }}
  {{- include "kvrouter.environment" (dict "root" $root "pod" $pod "snapshot" "picker.snapshot" "peer" (include "kvrouter.peerUrl" $root)) | nindent 2 }}
  ports:
    - {name: grpc, containerPort: {{ $picker.port }}}
    - {name: metrics, containerPort: {{ include "kvrouter.adminPort" $root }}}
  startupProbe:
    {{- include "kvrouter.probe" (list $root (dict "httpGet" (dict "path" "/health" "port" "metrics") "periodSeconds" 2 "failureThreshold" 60 "timeoutSeconds" 3)) | nindent 4 }}
  livenessProbe:
    {{- include "kvrouter.probe" (list $root (dict "httpGet" (dict "path" "/health" "port" "metrics") "periodSeconds" 10 "failureThreshold" 6 "timeoutSeconds" 5)) | nindent 4 }}
  readinessProbe:
    {{- if dig "picker" "certificate" "" $root.Values.config }}
    # The kubelet's gRPC speaks no TLS.
    {{- include "kvrouter.probe" (list $root (dict "httpGet" (dict "path" "/ready" "port" "metrics"))) | nindent 4 }}
    {{- else }}
    grpc: {port: {{ $picker.port }}}
    {{- end }}
    periodSeconds: 2
    failureThreshold: 3
    timeoutSeconds: 3
  lifecycle:
    preStop:
      exec: {command: [sleep, {{ index . 2 | quote }}]}
  resources:
    {{- toYaml $picker.resources | nindent 4 }}
  {{- include "kvrouter.mounts" (dict "root" $root "pod" $pod) | nindent 2 }}
{{- end -}}
