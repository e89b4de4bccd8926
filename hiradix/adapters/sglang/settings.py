"""Settings that SGLang has no flag for: each comes from an environment variable or the file of
HIRADIX_CONFIG."""

from __future__ import annotations

from collections.abc import Mapping

from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.intents.limits import IntentLimits
from hiradix.settings import Setting, Type, fields_of, setting_of, settings_of
from hiradix.sources import Resolved, resolve

EXTRA = "hicache_storage_backend_extra_config"
_NOT_SGLANGS = ("hicache_no_regret", "hicache_storage_identity", "explain_names")
ATTACHABLE = Setting("attachable", Type.STORES, {}, "configurations that requests attach by name")
ATTACH_ALLOW = Setting(
    "attach_allow", Type.LIST, (), "rules of what else it may attach, as of `--attach-allow`"
)
OWN = (
    *(setting_of(HiCacheConfig, name) for name in _NOT_SGLANGS),
    ATTACHABLE,
    ATTACH_ALLOW,
    *settings_of(IntentLimits),
)
_ITS_FLAGS = {one.name for one in settings_of(HiCacheConfig)} - set(_NOT_SGLANGS)
ADMIN_PORT = "admin_port"  # in the file it is vLLM's; the variable is read by `hiradix.adapters.admin`
_IN_EXTRA = {one.name for one in settings_of(ExtraConfig)}


def place_of(one: Setting) -> str:
    """The flag or variable that sets `one` inside SGLang; "" for a setting that SGLang does not have."""
    if one.name in _ITS_FLAGS:
        return f"its own {one.flag}"
    own = next((own for own in OWN if own.name == one.name), None)
    if own is None:
        return ""
    inside = f", {EXTRA}: {one.name}" if one.name in _IN_EXTRA else ""
    return f"{own.variable}{inside}"


def own_settings(environment: Mapping[str, str]) -> Resolved:
    """Ours beside SGLang's flags. Raises ConfigError that names a variable or a line of the file."""
    elsewhere = dict.fromkeys(_ITS_FLAGS, "SGLang's own flag") | {ADMIN_PORT: "vLLM"}
    found = resolve(OWN, {}, environment, elsewhere, is_guest=True)
    found.check()
    return found


def intent_limits(environment: Mapping[str, str]) -> IntentLimits:
    """Caps on wishes, as variables and the file say. Raises ConfigError."""
    own = own_settings(environment)
    return IntentLimits(**{field: own[one.name] for field, one in fields_of(IntentLimits)})
