{{- define "gangway.fullname" -}}
{{- if contains "gangway" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-gangway" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "gangway.selector" -}}
app.kubernetes.io/name: gangway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Whether a protocol speaks TLS, "" if not: by the values, or by a flag. */}}
{{- define "gangway.secured" -}}
{{- if or (and .root.Values.tls.secret (index .root.Values.tls .protocol)) (has (printf "--%s-use-ssl=true" .protocol) .root.Values.flags) }}yes{{ end }}
{{- end }}

{{- define "gangway.labels" -}}
{{ include "gangway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
