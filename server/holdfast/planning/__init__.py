"""`holdfast plan`: what would be reserved, for which caller, and why, without an engine.

`command` prints a plan: `config` reads the model's configuration, `layout` refuses sizes
that no engine can have, `kv_cost` turns bytes into tokens, and `report` lays out the result. They
run in a process of their own. The flags are here, because `--help` must import neither vLLM nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.settings.flag import command_parser

DEVICE_NAMES = ("gb10", "rtxpro6000", "h100", "h200", "b200", "cpu")
_EPILOG = """\
All flags of `holdfast serve` work too. No engine is started and nothing is downloaded: MODEL is a
local directory or is in the Hugging Face cache. What cannot be known without the device is shown as
"measured at first start". Exit codes: 0 printed, 2 bad usage or a wrong model, 3 no engine could
start here, for example because VLLM_PLUGINS leaves Holdfast out.
"""


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """The flags of `holdfast plan`; without a device, the plan is for this machine's."""

    device: str | None
    is_json: bool


def take_plan_flags(arguments: Sequence[str]) -> tuple[PlanFlags, list[str]]:
    """Return the flags of `plan`, and the arguments that are left for the parser of `serve`.

    Raises:
        UsageError: `--device` names an unknown device.
    """
    parser = command_parser(
        "plan",
        "MODEL [flags of holdfast serve] [flags below]",
        "Print what would be reserved, per rank and slot, with reasons.",
        _EPILOG,
    )
    parser.add_argument(
        "--device",
        choices=DEVICE_NAMES,
        help="plan for this device instead of the one of this machine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    namespace, others = parser.parse_known_args(arguments)
    return PlanFlags(namespace.device, namespace.json), others
