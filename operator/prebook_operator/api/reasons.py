"""Every reason that the operator gives: in conditions, Events, metrics and logs alike."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One word for programs; the sentence for people goes beside it."""

    # the whole model
    SERVING = "Serving"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    PAUSED = "Paused"
    DEGRADED = "Degraded"
    SCALED_TO_ZERO = "ScaledToZero"
    NEW_GENERATION = "NewGeneration"
    UP_TO_DATE = "UpToDate"
    # the user's to mend
    INVALID_SPEC = "InvalidSpec"
    FORBIDDEN_FIELD = "ForbiddenField"
    FOREIGN_OBJECT = "ForeignObject"
    SECRET_MISSING = "SecretMissing"
    # pods
    PODS_NOT_READY = "PodsNotReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOP = "CrashLoop"
    UNSCHEDULABLE = "Unschedulable"
    ENGINE_INCOMPATIBLE = "EngineIncompatible"
    # pods that the API server refuses
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_SECURITY = "PodSecurityViolation"
    ADMISSION_DENIED = "AdmissionDenied"
    PODS_REFUSED = "PodsRefused"
    # pairing
    PAIRED = "Paired"
    PAIRING = "Pairing"
    NO_PAIRS = "NoPairs"
    PAIRS_UNKNOWN = "PairsUnknown"
    LOCAL_PREFILL_ONLY = "LocalPrefillOnly"
    # fabric
    FABRIC_AVAILABLE = "FabricAvailable"
    FABRIC_NOT_NEEDED = "FabricNotNeeded"
    NO_MATCHING_NODES = "NoMatchingNodes"
    TOO_FEW_GPUS = "TooFewGPUs"
    TOO_FEW_EFA_DEVICES = "TooFewEFADevices"
    ZONES_DIFFER = "ZonesDiffer"
    NODES_UNKNOWN = "NodesUnknown"
    # scaling
    WITHIN_RATIO = "WithinRatio"
    CLAMPED_TO_RATIO = "ClampedToRatio"
    # the operator's own trouble
    API_ERROR = "APIError"
    APPLIED = "Applied"
    CREATED = "Created"
    DELETED = "Deleted"
