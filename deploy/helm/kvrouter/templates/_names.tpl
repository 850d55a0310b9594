{{/* Names and labels. */}}

{{- define "kvrouter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 35 characters, so that those of a worker's objects fit into 63. */}}
{{- define "kvrouter.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 35 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvrouter.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 35 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvrouter.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "kvrouter.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* The name of the model that a worker serves. */}}
{{- define "kvrouter.servedModel" -}}
{{- .servedModelName | default .model | default "simulated" -}}
{{- end -}}

{{/* The name of a worker's objects: list of root and worker. */}}
{{- define "kvrouter.workerName" -}}
{{- printf "%s-worker-%s" (include "kvrouter.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* What a selector of a component's pods has: list of root and component. */}}
{{- define "kvrouter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvrouter.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object: list of root and component. */}}
{{- define "kvrouter.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvrouter.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvrouter
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: list of root, component, suffix of the name and, if any, annotations. */}}
{{- define "kvrouter.metadata" -}}
{{- $root := index . 0 -}}
{{- $suffix := index . 2 -}}
{{- $more := dict -}}
{{- if gt (len .) 3 -}}{{- $more = index . 3 -}}{{- end -}}
name: {{ include "kvrouter.fullname" $root }}{{ if $suffix }}-{{ $suffix }}{{ end }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "kvrouter.labels" (list $root (index . 1)) | nindent 2 }}
{{- with merge (dict) (deepCopy $more) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image: list of its values and the tag where they have none. */}}
{{- define "kvrouter.image" -}}
{{- $image := index . 0 -}}
{{- $name := $image.repository -}}
{{- with $image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end -}}
