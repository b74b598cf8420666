"""The keys of the custom resources we write, as their operators' definitions have them (Strimzi 1.0, KEDA 2.21,
prometheus-operator 0.85): a validator of core kinds lets every misspelling in these pass.

A dict holds the keys that are allowed, a list of one the form of its items, FREE anything (a map of the user's own).
"""

from __future__ import annotations

from typing import Any

FREE = None

_POD_ENDPOINT = dict.fromkeys(
    ["port", "path", "interval", "scrapeTimeout", "honorLabels", "relabelings", "metricRelabelings", "filterRunning"]
)
_TRIGGER_KAFKA = {
    "bootstrapServers": FREE,
    "consumerGroup": FREE,
    "topic": FREE,
    "lagThreshold": FREE,
    "activationLagThreshold": FREE,
    "offsetResetPolicy": FREE,
    "allowIdleConsumers": FREE,
    "scaleToZeroOnInvalidOffset": FREE,
    "excludePersistentLag": FREE,
    "limitToPartitionsWithLag": FREE,
    "ensureEvenDistributionOfPartitions": FREE,
    "version": FREE,
    "partitionLimitation": FREE,
    "sasl": FREE,
    "tls": FREE,
    "unsafeSsl": FREE,
}

SPECS: dict[tuple[str, str], Any] = {
    ("kafka.strimzi.io/v1", "KafkaTopic"): {"topicName": FREE, "partitions": FREE, "replicas": FREE, "config": FREE},
    ("kafka.strimzi.io/v1", "KafkaUser"): {
        "authentication": {"type": FREE},
        "authorization": {
            "type": FREE,
            "acls": [
                {
                    "resource": {"type": FREE, "name": FREE, "patternType": FREE},
                    "operations": FREE,
                    "host": FREE,
                    "type": FREE,
                }
            ],
        },
        "quotas": FREE,
        "template": FREE,
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef": {"apiVersion": FREE, "kind": FREE, "name": FREE, "envSourceContainerName": FREE},
        "pollingInterval": FREE,
        "cooldownPeriod": FREE,
        "initialCooldownPeriod": FREE,
        "idleReplicaCount": FREE,
        "minReplicaCount": FREE,
        "maxReplicaCount": FREE,
        "fallback": {"failureThreshold": FREE, "replicas": FREE, "behavior": FREE},
        "advanced": {
            "restoreToOriginalReplicaCount": FREE,
            "horizontalPodAutoscalerConfig": {"name": FREE, "behavior": FREE},
            "scalingModifiers": FREE,
        },
        "triggers": [
            {
                "type": FREE,
                "name": FREE,
                "metadata": _TRIGGER_KAFKA,
                "metricType": FREE,
                "useCachedMetrics": FREE,
                "authenticationRef": {"name": FREE, "kind": FREE},
            }
        ],
    },
    ("keda.sh/v1alpha1", "TriggerAuthentication"): {
        "secretTargetRef": [{"parameter": FREE, "name": FREE, "key": FREE}],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "jobLabel": FREE,
        "podTargetLabels": FREE,
        "selector": {"matchLabels": FREE, "matchExpressions": [{"key": FREE, "operator": FREE, "values": FREE}]},
        "namespaceSelector": {"matchNames": FREE, "any": FREE},
        "podMetricsEndpoints": [_POD_ENDPOINT],
        "sampleLimit": FREE,
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [
            {
                "name": FREE,
                "interval": FREE,
                "rules": [
                    {
                        "alert": FREE,
                        "record": FREE,
                        "expr": FREE,
                        "for": FREE,
                        "keep_firing_for": FREE,
                        "labels": FREE,
                        "annotations": {"summary": FREE, "description": FREE, "runbook_url": FREE},
                    }
                ],
            }
        ]
    },
}


def unknown_keys(value: Any, allowed: Any, place: str = "spec") -> list[str]:
    """Where `value` has keys its definition does not have."""
    if allowed is FREE:
        return []
    if isinstance(allowed, list):
        if not isinstance(value, list):
            return [f"{place} is no list"]
        return [found for n, item in enumerate(value) for found in unknown_keys(item, allowed[0], f"{place}[{n}]")]
    if not isinstance(value, dict):
        return [f"{place} is no map"]
    found = [f"{place}.{key}" for key in value.keys() - allowed.keys()]
    for key in value.keys() & allowed.keys():
        found += unknown_keys(value[key], allowed[key], f"{place}.{key}")
    return found
