{{- define "roost.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "roost.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Labels that select the pods of a component: (dict "root" $ "component" "router") */}}
{{- define "roost.selector" -}}
app.kubernetes.io/name: roost
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "roost.labels" -}}
{{ include "roost.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "roost.meta" -}}
name: {{ include "roost.name" .root }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "roost.labels" . | nindent 2 }}
{{- end -}}

{{- define "roost.urls" -}}
{{- if .Values.nats.enabled -}}
{{- $scheme := ternary "tls" "nats" (ne .Values.bus.caSecret "") -}}
{{- $scheme }}://{{ include "roost.name" . }}-nats.{{ .Release.Namespace }}.svc:4222
{{- else -}}
{{- required "bus.urls: name the servers of your NATS, or set nats.enabled" (join "," .Values.bus.urls) -}}
{{- end -}}
{{- end -}}

{{/* Settings of a pod that contains a part of Roost. Without enableServiceLinks: false, Kubernetes would set variables
such as ROOST_ROUTER_PORT for the Services, and Roost refuses variables that are no settings. */}}
{{- define "roost.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "roost.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "roost.selector" . | nindent 8 }}
{{- end -}}

{{- define "roost.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Variables of every part: (dict "root" $ "role" "router") */}}
{{- define "roost.environment" -}}
- {name: ROOST_BUS_URLS, value: {{ include "roost.urls" .root | quote }}}
- {name: ROOST_BUS_NAMESPACE, value: {{ .root.Values.bus.namespace | quote }}}
- {name: ROOST_BUS_CREDENTIALS_FILE, value: /etc/roost/bus/{{ .role }}.json}
{{- if .root.Values.nats.enabled }}
- {name: ROOST_BUS_REPLICAS, value: {{ .root.Values.nats.replicas | quote }}}
{{- end }}
{{- if .root.Values.bus.caSecret }}
- {name: ROOST_BUS_TLS_CA, value: /etc/roost/bus-ca/ca.crt}
{{- end }}
- {name: ROOST_UP_LOG_FORMAT, value: json}
- {name: XDG_STATE_HOME, value: /tmp}
- {name: MALLOC_MMAP_THRESHOLD_, value: "1048576"}
{{- range $name, $value := .root.Values.environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{- define "roost.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: settings, mountPath: /etc/roost/config, readOnly: true}
- {name: bus, mountPath: /etc/roost/bus, readOnly: true}
{{- if .root.Values.bus.caSecret }}
- {name: bus-ca, mountPath: /etc/roost/bus-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* Of all logins a pod gets that of its role alone */}}
{{- define "roost.volumes" -}}
- name: tmp
  emptyDir: {}
- name: settings
  configMap:
    name: {{ include "roost.name" .root }}-settings
- name: bus
  secret:
    secretName: {{ .root.Values.bus.secret }}
    defaultMode: 288 # 0440
    items:
      - {key: {{ .role }}.json, path: {{ .role }}.json}
{{- if .root.Values.bus.caSecret }}
- name: bus-ca
  secret:
    secretName: {{ .root.Values.bus.caSecret }}
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end -}}

{{- define "roost.metrics-volume" -}}
- name: metrics
  secret:
    secretName: {{ .Values.metrics.secret }}
    defaultMode: 288
    items:
      - {key: metrics.key, path: metrics.key}
{{- end -}}

{{/* Probes of planner and tracker: /health needs no key. They answer it once their state is read. */}}
{{- define "roost.probes" -}}
startupProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}
