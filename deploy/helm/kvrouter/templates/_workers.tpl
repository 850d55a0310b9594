{{/* The engines' command lines: dict of root, worker and name. */}}

{{- define "kvrouter.publisher" -}}
{{- $events := .root.Values.events -}}
{{- $config := dict "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int $events.port)) "replay_endpoint" (printf "tcp://*:%d" (int $events.replayPort)) "topic" $events.topic "buffer_steps" (int $events.bufferSteps) -}}
{{- if eq .worker.engine "vllm" -}}
{{- $config = merge $config (dict "enable_kv_cache_events" true) -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}

{{- define "kvrouter.vllmCommand" -}}
{{- $w := .worker -}}
command:
  - vllm
  - serve
  - {{ $w.model | quote }}
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  {{- with $w.servedModelName }}
  - --served-model-name={{ . }}
  {{- end }}
  - --enable-prefix-caching
  - --enable-prompt-tokens-details
  - --tensor-parallel-size={{ $w.tensorParallelSize }}
  - --data-parallel-size={{ $w.dataParallelSize }}
  {{- with $w.blockSize }}
  - --block-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --max-model-len={{ int . }}
  {{- end }}
  {{- with $w.gpuMemoryUtilization }}
  - --gpu-memory-utilization={{ . }}
  {{- end }}
  {{- if $w.lora.enabled }}
  - --enable-lora
  - --max-loras={{ $w.lora.maxLoras }}
  - --max-lora-rank={{ $w.lora.maxRank }}
  {{- with $w.lora.adapters }}
  - --lora-modules
  {{- range $name, $path := . }}
  - {{ printf "%s=%s" $name $path | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
  - {{ printf "--kv-events-config=%s" (include "kvrouter.publisher" .) | quote }}
  {{- if ne $w.role "both" }}
  - {{ printf "--kv-transfer-config=%s" (toJson (dict "kv_connector" $w.disaggregation.connector "kv_role" "kv_both")) | quote }}
  {{- end }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "kvrouter.sglangCommand" -}}
{{- $w := .worker -}}
command:
  - python3
  - -m
  - sglang.launch_server
  - --model-path={{ $w.model }}
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  {{- with $w.servedModelName }}
  - --served-model-name={{ . }}
  {{- end }}
  {{- if .root.Values.secrets.workerApiKey.name }}
  - --api-key=$(WORKER_API_KEY)
  {{- end }}
  - --enable-cache-report
  - --enable-metrics
  - --tp-size={{ $w.tensorParallelSize }}
  - --{{ ternary "attn-dp-size" "dp-size" $w.dataParallelAttention }}={{ $w.dataParallelSize }}
  {{- with $w.blockSize }}
  - --page-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --context-length={{ int . }}
  {{- end }}
  {{- with $w.gpuMemoryUtilization }}
  - --mem-fraction-static={{ . }}
  {{- end }}
  {{- if $w.lora.enabled }}
  - --enable-lora
  - --max-loras-per-batch={{ $w.lora.maxLoras }}
  - --max-lora-rank={{ $w.lora.maxRank }}
  {{- /* Without adapters at the start it wants to be told which modules later ones have. */}}
  - --lora-target-modules=all
  {{- with $w.lora.adapters }}
  - --lora-paths
  {{- range $name, $path := . }}
  - {{ printf "%s=%s" $name $path | quote }}
  {{- end }}
  {{- end }}
  {{- end }}
  - {{ printf "--kv-events-config=%s" (include "kvrouter.publisher" .) | quote }}
  {{- if ne $w.role "both" }}
  - --disaggregation-mode={{ $w.role }}
  - --disaggregation-bootstrap-port={{ $w.disaggregation.port }}
  - --disaggregation-transfer-backend={{ $w.disaggregation.transferBackend }}
  {{- end }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "kvrouter.simulatedCommand" -}}
{{- $w := .worker -}}
args:
  - simulate
  - --host=0.0.0.0
  - --port={{ .root.Values.discovery.port }}
  - --model={{ $w.servedModelName | default $w.model | default "simulated" }}
  - --dp-size={{ $w.dataParallelSize }}
  {{- if .root.Values.secrets.workerApiKey.name }}
  - --api-key=$(WORKER_API_KEY)
  {{- end }}
  {{- with $w.blockSize }}
  - --block-size={{ . }}
  {{- end }}
  {{- with $w.maxModelLen }}
  - --max-model-len={{ int . }}
  {{- end }}
  {{- range $name, $path := $w.lora.adapters }}
  - --adapter={{ $name }}
  {{- end }}
  - {{ printf "--kv-events=%s" (include "kvrouter.publisher" .) | quote }}
  {{- range $w.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end -}}
