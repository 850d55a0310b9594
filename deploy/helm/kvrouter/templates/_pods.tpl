{{/* What pods have in common. */}}

{{/* podDefaults with a component's own, as YAML: list of root and the component's `pod`. */}}
{{- define "kvrouter.podValues" -}}
{{- toYaml (mergeOverwrite (deepCopy (index . 0).Values.podDefaults) (deepCopy (index . 1))) -}}
{{- end -}}

{{/* Metadata of a pod: dict of root, component, pod, labels (more of them) and config (whether it reads the settings). */}}
{{- define "kvrouter.podMetadata" -}}
labels:
  {{- include "kvrouter.labels" (list .root .component) | nindent 2 }}
  {{- with merge (dict) (.labels | default dict) .pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (dict) .pod.annotations .root.Values.commonAnnotations -}}
{{- if .checksum -}}
{{- $_ := set $annotations "checksum/config" (sha256sum .checksum) -}}
{{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where and as whom a pod runs: dict of root, pod and selector (labels of its replicas, as YAML). */}}
{{- define "kvrouter.podPlacement" -}}
{{- $selector := fromYaml .selector -}}
enableServiceLinks: false
securityContext:
  {{- toYaml .pod.securityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .pod.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .pod.affinity }}
  {{- toYaml .pod.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- toYaml $selector | nindent 14 }}
  {{- end }}
{{- with .pod.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $selector))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .pod.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An environment variable from a Secret: list of its name and a reference of name and key. */}}
{{- define "kvrouter.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ (index . 1).name }}
      key: {{ (index . 1).key }}
{{- end -}}

{{/* A horizontal autoscaler: list of root, component and its values. */}}
{{- define "kvrouter.autoscaler" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $scaling := (index . 2).autoscaling -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "kvrouter.metadata" (list $root $component $component) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "kvrouter.fullname" $root }}-{{ $component }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $scaling.targetCPU }}}
    {{- with $scaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $scaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* A pod disruption budget, where more than one replica may run: list of root, component and its values. */}}
{{- define "kvrouter.disruptionBudget" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvrouter.metadata" (list $root $component $component) | nindent 2 }}
spec:
  maxUnavailable: {{ (index . 2).podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "kvrouter.selectorLabels" (list $root $component) | nindent 6 }}
{{- end -}}

{{/* Autoscaler and disruption budget of a component: list of root, component and its values. */}}
{{- define "kvrouter.availability" -}}
{{- $values := index . 2 -}}
{{- if $values.autoscaling.enabled }}
---
{{ include "kvrouter.autoscaler" . }}
{{- end }}
{{- if and $values.podDisruptionBudget.enabled (or $values.autoscaling.enabled (gt (int $values.replicas) 1)) }}
---
{{ include "kvrouter.disruptionBudget" . }}
{{- end }}
{{- end -}}

{{/* The service that clients use: list of root, component, its values and its port's application protocol. */}}
{{- define "kvrouter.clientService" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $service := (index . 2).service -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "kvrouter.metadata" (list $root $component $component $service.annotations) | nindent 2 }}
spec:
  type: {{ $service.type }}
  selector:
    {{- include "kvrouter.selectorLabels" (list $root $component) | nindent 4 }}
  ports:
    - name: http
      port: {{ $service.port }}
      targetPort: http
      appProtocol: {{ index . 3 }}
      {{- if and $service.nodePort (ne $service.type "ClusterIP") }}
      nodePort: {{ $service.nodePort }}
      {{- end }}
{{- end -}}
