{{- define "sparsegdn.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "sparsegdn.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sparsegdn.labels" -}}
{{ include "sparsegdn.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "sparsegdn.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if and .Values.gpu.enabled (not .Values.image.tag) -}}
{{- $tag = printf "%s-cuda" $tag -}}
{{- end -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}

{{- define "sparsegdn.modelDir" -}}
{{ .Values.model.mountPath }}
{{- end -}}

{{- define "sparsegdn.drainSeconds" -}}
{{- add .Values.drain.longestPrefillSeconds .Values.drain.transferSeconds -}}
{{- end -}}

{{- /* Above preStop plus the longest prefill, its transfer and the exit. */ -}}
{{- define "sparsegdn.graceSeconds" -}}
{{- add .Values.drain.preStopSeconds (include "sparsegdn.drainSeconds" . | int) .Values.drain.exitSeconds -}}
{{- end -}}

{{- define "sparsegdn.listen" -}}
0.0.0.0:{{ .Values.ports.grpc }}
{{- if .Values.unixSocket.enabled }},unix:{{ .Values.unixSocket.mountPath }}/grpc.sock{{ end }}
{{- end -}}

{{- /* Peers of a network policy: pods of these namespaces. An empty `from` would admit everybody. */ -}}
{{- define "sparsegdn.peers" -}}
{{- if . -}}
- namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values:
          {{- toYaml . | nindent 10 }}
{{- else -}}
- podSelector: {}
{{- end -}}
{{- end -}}

{{- /* What the chart knows wins over .Values.config, which the schema keeps from naming it. */ -}}
{{- define "sparsegdn.config" -}}
{{- $own := dict
  "listen" (include "sparsegdn.listen" .)
  "metrics_listen" (printf "0.0.0.0:%d" (int .Values.ports.http))
  "drain_seconds" (include "sparsegdn.drainSeconds" . | int)
  "model" (dict "dir" (include "sparsegdn.modelDir" .)
                "backend" (ternary "cuda" "cpu" .Values.gpu.enabled)) -}}
{{- if .Values.tls.secretName -}}
{{- $tls := dict "cert" "/etc/sparsegdn/tls/tls.crt" "key" "/etc/sparsegdn/tls/tls.key" -}}
{{- if .Values.tls.clientCaSecretName -}}
{{- $_ := set $tls "client_ca" "/etc/sparsegdn/client-ca/ca.crt" -}}
{{- end -}}
{{- $_ := set $own "tls" $tls -}}
{{- end -}}
{{- if .Values.auth.tokensSecretName -}}
{{- $_ := set $own "auth" (dict "tokens" "/etc/sparsegdn/auth/tokens") -}}
{{- end -}}
{{- if .Values.redis.passwordSecretName -}}
{{- $_ := set $own "prefix_cache" (dict "redis_password_file" "/etc/sparsegdn/redis/password") -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.config) $own | toPrettyJson -}}
{{- end -}}
