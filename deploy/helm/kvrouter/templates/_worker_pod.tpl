{{/*
The pod of a worker, or of one of its nodes: dict of root, name, worker, pod, selector (labels, as YAML) and part.
The part is `worker` for a pod that serves requests, and `node` for one that only computes for the leader of its group.
*/}}
{{- define "kvrouter.workerTemplate" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $worker := .worker -}}
{{- $pod := .pod -}}
{{- $serves := eq .part "worker" -}}
{{- $full := include "kvrouter.workerName" (list $root $name) -}}
{{- $labels := dict "kvrouter.io/worker" $name "kvrouter.io/role" $worker.role "kvrouter.io/engine" $worker.engine -}}
{{- $selector := .selector -}}
{{- $events := $root.Values.events -}}
{{- $real := ne $worker.engine "simulated" -}}
metadata:
  {{- include "kvrouter.podMetadata" (dict "root" $root "component" (ternary "worker" "worker-node" $serves) "pod" $pod "labels" $labels) | nindent 2 }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add (int $worker.drainSeconds) 30 }}
  {{- include "kvrouter.podPlacement" (dict "root" $root "pod" $pod "selector" $selector) | nindent 2 }}
  containers:
    - name: {{ ternary "engine" "simulated" $real }}
      image: {{ $worker.image | default (ternary (get $root.Values.engineImages $worker.engine) (include "kvrouter.image" (list $root.Values.image $root.Chart.AppVersion)) $real) }}
      imagePullPolicy: {{ $worker.imagePullPolicy }}
      {{- include (printf "kvrouter.%sCommand" $worker.engine) (dict "root" $root "worker" $worker "name" $name "part" .part) | nindent 6 }}
      securityContext:
        {{- toYaml $pod.containerSecurityContext | nindent 8 }}
      env:
        - {name: HOME, value: /home/worker}
        # Images of engines do not know the user; what asks for a name finds it here.
        - {name: USER, value: worker}
        {{- if and (eq $worker.engine "vllm") $worker.lora.enabled }}
        - {name: VLLM_ALLOW_RUNTIME_LORA_UPDATING, value: "True"}
        {{- end }}
        - {name: PYTHONHASHSEED, value: {{ $worker.hashSeed | quote }}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if and (eq $worker.engine "vllm") (has $worker.role (list "prefill" "decode")) }}
        - {name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP)}
        - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ $worker.disaggregation.port | quote }}}
        {{- end }}
        {{- with include "kvrouter.pullPort" (dict "root" $root "worker" $worker) }}
        - {name: VLLM_P2P_SIDE_CHANNEL_HOST, value: $(POD_IP)}
        - {name: VLLM_P2P_SIDE_CHANNEL_PORT, value: {{ . | quote }}}
        {{- end }}
        {{- if $root.Values.secrets.workerApiKey.name }}
        {{- include "kvrouter.secretEnv" (list (ternary "VLLM_API_KEY" "WORKER_API_KEY" (eq $worker.engine "vllm")) $root.Values.secrets.workerApiKey) | nindent 8 }}
        {{- end }}
        {{- if and $real $root.Values.pool.address }}
        - {name: MOONCAKE_CONFIG_PATH, value: /etc/kvrouter/pool/mooncake.json}
        {{- if eq $worker.engine "sglang" }}
        - {name: SGLANG_HICACHE_MOONCAKE_CONFIG_PATH, value: /etc/kvrouter/pool/mooncake.json}
        {{- end }}
        {{- end }}
        {{- if $worker.huggingFaceToken.name }}
        {{- include "kvrouter.secretEnv" (list "HF_TOKEN" $worker.huggingFaceToken) | nindent 8 }}
        {{- end }}
        {{- with $pod.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pod.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $serves }}
      ports:
        - {name: http, containerPort: {{ $root.Values.discovery.port }}}
        {{- range $rank := until (int $worker.dataParallelSize) }}
        - {name: events-{{ $rank }}, containerPort: {{ add (int $events.port) $rank }}}
        - {name: replay-{{ $rank }}, containerPort: {{ add (int $events.replayPort) $rank }}}
        {{- end }}
        {{- if has $worker.role (list "prefill" "decode") }}
        - {name: transfer, containerPort: {{ $worker.disaggregation.port }}}
        {{- end }}
      startupProbe:
        {{- toYaml $worker.startupProbe | nindent 8 }}
      livenessProbe:
        {{- toYaml $worker.livenessProbe | nindent 8 }}
      readinessProbe:
        {{- toYaml $worker.readinessProbe | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          # A terminating pod receives no new requests. Requests in flight continue.
          exec: {command: [sleep, {{ $worker.drainSeconds | quote }}]}
      {{- $resources := deepCopy $worker.resources }}
      {{- $count := mul (int $worker.tensorParallelSize) (ternary 1 (int $worker.dataParallelSize) $worker.dataParallelAttention) }}
      {{- $count = div $count (int $worker.nodes) }}
      {{- if not (kindIs "invalid" $worker.gpus) }}{{- $count = int $worker.gpus }}{{- end }}
      {{- if and $real $count }}
      {{- $gpus := dict $worker.gpuResource $count }}
      {{- $resources = mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /home/worker}
        - {name: tmp, mountPath: /tmp}
        {{- if $real }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if and $real $root.Values.pool.address }}
        - {name: pool, mountPath: /etc/kvrouter/pool, readOnly: true}
        {{- end }}
        {{- with $pod.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pod.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: home
      {{- if $worker.modelCache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ $worker.modelCache.existingClaim }}
      {{- else if $worker.modelCache.enabled }}
      persistentVolumeClaim:
        claimName: {{ $full }}-models
      {{- else if $worker.modelCache.sizeLimit }}
      emptyDir:
        sizeLimit: {{ $worker.modelCache.sizeLimit }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if $real }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.shmSize }}}
    {{- end }}
    {{- if and $real $root.Values.pool.address }}
    - name: pool
      configMap:
        name: {{ include "kvrouter.fullname" $root }}-pool
    {{- end }}
    {{- with $pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
