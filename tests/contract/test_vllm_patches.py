"""Every site of `PATCHES` is where it was: in the vLLM that is installed, and in the next one.

The next one is not installed. `vllm_sites.json` says what its wheel has at each site, and
`tests/support/vllm_sources.py` writes it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

import holdfast
from holdfast.errors import EngineStartError, ExitCode
from holdfast.patches import PATCHES, check
from holdfast.patches.patch import Patch, missing_sites
from holdfast.versions import SUPPORTED_VLLM
from vllm_sources import RECORD, SITES, Sources, installed, of_wheel, site_packages

ROOT = Path(holdfast.__file__).parent
NEXT = json.loads(RECORD.read_text(encoding="utf-8"))
"""What the wheel of the next vLLM has."""
REMEDY = "see tests/support/vllm_sources.py, and read what it has there beside our change"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving:ChatCompletion"
_CONNECTOR = "vllm.multimodal.media:MediaConnector"
_CONNECTION = "vllm.connections:HTTPConnection"
_MESSAGES = "vllm.renderers.chat_utils"
_GRAMMARS = "vllm.v1.structured_output"
_CREATE_BATCH = (
    "vllm.entrypoints.openai.chat_completion.batch_serving"
    ":OpenAIServingChatBatch.create_batch_chat_completion"
)
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_PART = "parse_chat_message_content_part"
READ_IN_BOTH = {
    "vllm.config.vllm:VllmConfig.use_v2_model_runner": "asked, and not changed",
    f"{_CHAT}ResponseStreamChoice": "a field of the last chunk, which its own model writes",
    f"{_CHAT}StreamResponse": "a field in each chunk, so that vLLM's own model writes them all",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.record_read": "looks at its "
    "socket itself, so ours leaves it alone",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter": "tells "
    "the error itself; ours passes its objects on",
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search": "sorts beams "
    "otherwise; ours calls it as a whole",
    "vllm.entrypoints.generate.base.serving:GenerateBaseServing."
    "_convert_generation_error_to_streaming_response": "the same JSON, from the error itself",
    f"{_RESPONSES}.responses_background_stream_generator": "one more last event; ours needs none",
    f"{_RESPONSES}.responses_stream_generator": "one more last event, which ours passes on",
    "vllm.entrypoints.generate.structured_decisions.serving:build_question": "one more option, "
    "which ours passes on",
    "vllm.entrypoints.openai.responses.protocol:ResponsesResponse.from_request": "more fields",
    f"{_CONNECTION}.async_get_bytes": "is given a budget, which ours charges",
    f"{_CONNECTION}.get_bytes": "as above",
    f"{_CONNECTOR}.fetch_audio_async": "another way to the decoder, which ours leaves alone",
    f"{_CONNECTOR}.fetch_image_async": "as above",
    f"{_CONNECTOR}.fetch_video_async": "as above",
    f"{_CONNECTOR}.load_from_url": "gives a budget to the connection",
    f"{_CONNECTOR}.load_from_url_async": "as above",
    "vllm.parser:ParserManager.get_parser": "another default, which ours passes on",
    _CREATE_BATCH: "looks for an adapter by chat; ours passes the whole batch on",
    f"{_MESSAGES}:_postprocess_messages or {_MESSAGES}.chat_message:_postprocess_messages": "a log",
    f"{_MESSAGES}:_{_PART} or {_MESSAGES}.chat_message:{_PART}": "more kinds of media",
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat": "more for the parser",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "one more error, which ours lets pass",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "ours calls it as a whole",
    "vllm.v1.engine.utils:get_mp_context": "does more only where vLLM forks, which ours does not",
    "vllm.v1.executor.multiproc_executor:get_mp_context": "as above",
    f"{_GRAMMARS}.backend_xgrammar:validate_xgrammar_grammar": "refuses what it let pass",
    f"{_GRAMMARS}:StructuredOutputManager.grammar_bitmask": "other rows, which vLLM fills",
    f"{_GRAMMARS}:StructuredOutputManager.grammar_init": "one more error, which ours lets pass",
    "vllm.v1.utils:kill_process_tree": "bears one more error; ours takes its place",
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": "a frame around what it was",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": "profiles more graphs",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": "a hook after what it did",
}
"""Each site whose code is another in the next vLLM, and why our change holds for both."""


def test_the_installed_sources_have_every_site() -> None:
    """The way in which sources are read finds everything that is there."""
    assert [site for site in SITES if installed().definition(site) is None] == []


def test_the_next_vllm_has_every_site() -> None:
    """A new site is looked for in its wheel, too."""
    assert [site for site in SITES if NEXT["sites"].get(site) is None] == [], REMEDY


def test_what_is_other_code_in_the_next_vllm_was_read() -> None:
    """No test runs it, so a person has to read it."""
    here, there = installed().hashes(), NEXT["sites"]
    assert {site for site in SITES if here[site] != there.get(site)} == set(READ_IN_BOTH), REMEDY


def test_the_record_is_that_of_the_last_supported_vllm() -> None:
    """Or the next one is another by now."""
    assert NEXT["vllm"].startswith("{}.{}.".format(*SUPPORTED_VLLM[-1]))


def test_a_wheel_is_read_as_what_is_installed(tmp_path: Path) -> None:
    """By the same paths."""
    site, path = "vllm.v1.worker.workspace:WorkspaceManager", tmp_path / "wheel"
    with ZipFile(path, "w") as wheel:
        wheel.write(site_packages() / "vllm/v1/worker/workspace.py", "vllm/v1/worker/workspace.py")
    with ZipFile(path) as wheel:
        found = of_wheel(wheel).definition(site)
    assert found == installed().definition(site)
    assert found is not None
    assert found.startswith("class WorkspaceManager")


def test_the_bases_of_a_class_decide_where_others_are_registered() -> None:
    """The method is that of their metaclass, which a class without bases does not have."""
    source = "class Abstract(Base):\n    x = 1\nclass Plain:\n    x = 1"
    sources = Sources({"some.py": source}.get)
    assert sources.definition("some:Abstract.register") == "class Abstract(Base)"
    assert sources.definition("some:Plain.register") is None


@pytest.mark.parametrize(
    "site",
    [
        "vllm.v1.worker.workspace:Gone",
        "vllm.v1.worker.gone:WorkspaceManager",
        "vllm.v1.worker.worker_base:WorkerWrapperBase.gone",
        "vllm.v1.metrics.loggers:gone",
    ],
)
def test_what_is_not_in_the_sources_is_missed(site: str) -> None:
    """A walk that finds everything would prove nothing."""
    assert installed().definition(site) is None


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_every_site_is_found_where_it_is_imported(patch: Patch) -> None:
    """A process that looks for it finds it, so that none ends for nothing."""
    for site in patch.sites:
        with suppress(ImportError):  # of a place that it moved to in another version
            import_module(site.partition(":")[0])
    assert missing_sites(patch) == []


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("vllm.lora.request:LoRARequest", "load_inplace"),
        ("vllm.multimodal.media.video:VideoMediaIO", "image_io"),
        ("vllm.v1.engine.output_processor:RequestState", "remote_prefill_cached_tokens"),
    ],
)
def test_a_start_ends_without_what_requests_would_fail_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, attribute: str
) -> None:
    """An attribute that is set on vLLM's objects."""
    module, _, name = kind.partition(":")
    monkeypatch.setattr(import_module(module), name, type(name, (), {}))
    with pytest.raises(EngineStartError) as caught:
        check("front end")
    assert caught.value.exit_code is ExitCode.ENGINE_START
    assert f"{kind}.{attribute}" in caught.value.line


_SERVE_WITHOUT_ABSTRACT_CLASS = """
from vllm.v1.engine import async_llm

own = {name: value for name, value in vars(async_llm.AsyncLLM).items() if name[:4] != "_abc"}
for name in ("__dict__", "__weakref__"):
    own.pop(name, None)
async_llm.AsyncLLM = type("AsyncLLM", (), own)

from holdfast.cli import main

main(["serve", "--demo", "--port", "0"])
"""


def test_a_vllm_that_cannot_be_imported_with_our_change_is_named(tmp_path: Path) -> None:
    """A class that is not abstract any more, in which the import registers ours: exit 3."""
    ended = subprocess.run(
        [sys.executable, "-c", _SERVE_WITHOUT_ABSTRACT_CLASS],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == ExitCode.ENGINE_START
    assert "lacks vllm.v1.engine.async_llm:AsyncLLM.register" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.by)
def test_every_patch_names_the_code_that_makes_it(patch: Patch) -> None:
    """A function or a class of the module that it names."""
    module, _, name = patch.by.rpartition(".")
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    made = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert name in made
