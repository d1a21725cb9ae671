"""The unit tests mirror the server's packages; a list names the modules that other tests drive."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
SERVER = TESTS.parent / "server" / "holdfast"

LEAST_LINES = 60
"""A shorter module is tested with the modules that use it."""

DRIVEN_ELSEWHERE = {
    "api.admin.errors": "http/test_admin.py",
    "api.admin.models": "http/test_admin.py http/test_openapi.py",
    "api.admin.routes": "http/test_admin.py engine/test_admin.py",
    "api.admission": "http/test_admission.py http/test_admission_queue.py"
    " http/test_admission_websockets.py http/test_gate.py",
    "api.auth": "http/test_auth.py",
    "api.cross_origin": "http/test_cross_origin.py",
    "api.errors": "http/test_limits.py http/test_router.py",
    "api.follower_health": "http/test_follower_health.py",
    "api.health": "http/test_health.py",
    "api.keyring": "http/test_keyring.py",
    "api.limits": "http/test_limits.py",
    "api.load": "http/test_load.py",
    "api.message_limits": "http/test_message_limits.py http/test_limits.py",
    "api.metrics": "http/test_metrics.py http/test_scrapes.py",
    "api.openapi": "http/test_openapi.py",
    "api.quotas": "http/test_quotas.py http/test_used_up_days.py",
    "api.request_log": "http/test_request_log.py",
    "application": "unit/test_cli.py process/test_signals.py engine/test_states.py",
    "atomic_files": "unit/test_full_disk.py unit/lifecycle/test_kept_records.py",
    "demo.model": "engine/test_openai.py",
    "demo.steps": "unit/demo/test_files.py engine/test_openai.py",
    "demo.switches": "engine/test_crashes.py engine/test_probe_steps.py",
    "demo.tokenizer": "unit/demo/test_files.py unit/demo/test_lessons.py",
    "demo.weights": "unit/demo/test_files.py",
    "doctor.command_line": "unit/doctor/test_manifest_checks.py",
    "doctor.deployments": "unit/doctor/test_manifest_checks.py unit/doctor/test_probe_checks.py",
    "doctor.findings": "unit/doctor/test_command.py unit/doctor/test_checks.py",
    "engine.requests.aborts": "unit/engine/test_async_engine.py unit/engine/test_replay.py",
    "engine.launch.arguments": "process/test_vllm_flags.py process/test_usage_errors.py",
    "engine.checked_llm": "contract/test_vllm_sequences.py contract/test_vllm_grammars.py",
    "engine.launch.configure": "process/test_usage_errors.py engine/test_engine_deaths.py",
    "engine.launch.construction": "engine/test_engine_deaths.py engine/test_host_memory.py",
    "engine.requests.continuation": "contract/test_vllm_continuation.py",
    "engine.model.facts": "contract/test_vllm_images.py contract/test_vllm_answer_limit.py"
    " gpu_paths/test_scheduler.py",
    "engine.grammars.checker": "process/test_grammar_processes.py contract/test_vllm_grammars.py",
    "engine.grammars.compiler": "contract/test_vllm_grammars.py",
    "engine.grammars.given_up": "contract/test_vllm_grammars.py",
    "engine.grammars.pool": "process/test_grammar_processes.py",
    "engine.grammars.reaper": "process/test_grammar_processes.py",
    "engine.grammars.requests": "contract/test_vllm_grammars.py",
    "engine.grammars.text": "contract/test_vllm_grammars.py",
    "engine.grammars.workers": "process/test_grammar_processes.py",
    "engine.launch.head_node": "engine/test_nodes.py",
    "engine.interface": "unit/lifecycle/test_supervisor.py",
    "engine.launch.late_engine": "process/test_signals.py process/test_another_vllm.py"
    " engine/test_states.py",
    "engine.launch.launcher": "engine/test_recovery.py engine/test_engine_deaths.py",
    "engine.requests.load": "unit/engine/test_replay.py",
    "engine.loras": "unit/engine/test_async_engine.py",
    "engine.maintenance": "unit/engine/test_async_engine.py",
    "engine.media.budgets": "contract/test_vllm_media.py",
    "engine.media.clips": "contract/test_vllm_media.py",
    "engine.media.formats": "contract/test_vllm_media.py",
    "engine.media.limits": "contract/test_vllm_media.py",
    "engine.media.public_fetch": "contract/test_vllm_media.py",
    "engine.media.realtime": "contract/test_vllm_realtime.py",
    "engine.launch.node_executor": "engine/test_nodes.py",
    "engine.launch.node_ranks": "process/test_node_ranks.py",
    "engine.openai_app": "contract/test_vllm_routes.py contract/test_vllm_http_metrics.py",
    "engine.outputs": "contract/test_vllm_outputs.py contract/test_vllm_sequences.py",
    "engine.proxy": "contract/test_vllm_outputs.py contract/test_vllm_context_limit.py",
    "engine.suspects.convictions": "unit/engine/test_blame.py",
    "engine.suspects.presence": "unit/engine/test_blame.py unit/engine/test_replay.py",
    "engine.requests.request": "unit/engine/test_replay.py unit/engine/test_blame.py",
    "engine.rpc": "unit/engine/test_async_engine.py contract/test_vllm_admin.py",
    "engine.requests.unread_tokens": "contract/test_vllm_sequences.py",
    "engine.unsupported": "process/test_usage_errors.py unit/test_cli.py",
    "engine.vllm_errors": "process/test_usage_errors.py",
    "engine.worker_adapters": "unit/engine/test_async_engine.py",
    "health_check": "process/test_health_check.py",
    "labels": "project/test_docs.py contract/test_vllm_admin.py",
    "lifecycle.commands": "unit/lifecycle/test_operations.py",
    "lifecycle.death_task": "unit/lifecycle/test_proof.py unit/lifecycle/test_supervisor.py",
    "lifecycle.service": "unit/lifecycle/test_supervisor.py unit/lifecycle/test_recycling.py",
    "listener.bounded_connection": "http/test_bounded_connection.py",
    "listener.errors": "http/test_bounded_connection.py http/test_http_connection.py",
    "listener.http_connection": "http/test_http_connection.py",
    "listener.tls": "process/test_tls.py",
    "listener.websocket_connection": "http/test_websocket_connection.py",
    "nodes.actions": "unit/nodes/test_head.py unit/nodes/test_follower.py",
    "nodes.streams": "unit/nodes/test_listener.py unit/nodes/test_dialer.py",
    "patches": "project/test_patches.py contract/test_vllm_patches.py",
    "patches.adapter_slots": "contract/test_vllm_adapter_slots.py",
    "patches.adapters": "contract/test_vllm_adapters.py",
    "patches.answer_parsing": "contract/test_vllm_answer_parsing.py",
    "patches.broken_responses": "contract/test_vllm_broken_responses.py",
    "patches.chunks": "contract/test_vllm_chunks.py",
    "patches.continued": "contract/test_vllm_continuation.py",
    "patches.front_end": "contract/test_vllm_processes.py contract/test_vllm_bodies.py",
    "patches.grammars": "contract/test_vllm_bounded_grammars.py",
    "patches.harmony": "contract/test_vllm_harmony.py",
    "patches.log_lines": "contract/test_vllm_log_lines.py",
    "patches.media_names": "contract/test_vllm_parameters.py",
    "patches.parameters": "contract/test_vllm_parameters.py",
    "patches.pooling": "contract/test_vllm_pooling.py",
    "patches.rendering": "contract/test_vllm_rendering.py",
    "patches.request_bodies": "contract/test_vllm_bodies.py contract/test_vllm_wide_bodies.py",
    "patches.stat_logger": "contract/test_vllm_metrics.py",
    "patches.thinking_budgets": "contract/test_vllm_thinking_budgets.py",
    "patches.tokenizer": "contract/test_vllm_tokenizer.py",
    "patches.tool_calls": "contract/test_vllm_tool_calls.py",
    "planning.config": "unit/planning/test_command.py",
    "planning.kv_cost": "unit/planning/test_command.py",
    "planning.report": "unit/planning/test_command.py",
    "probe.baseline": "unit/probe/test_suite.py engine/test_baseline.py",
    "probe.batches": "unit/probe/test_suite.py",
    "probe.budget": "unit/probe/test_suite.py",
    "probe.contexts": "unit/probe/test_suite.py gpu_paths/test_scheduler.py",
    "probe.decode_sizes": "unit/probe/test_sizes.py",
    "probe.decodes": "unit/probe/test_suite.py gpu_paths/test_scheduler.py",
    "probe.first_uses": "unit/probe/test_suite.py engine/test_probe_steps.py",
    "probe.session": "unit/probe/test_suite.py",
    "processes.preloaded": "unit/processes/test_forkserver.py gpu_paths/test_forks.py",
    "processes.signals": "process/test_signals.py process/test_early_signals.py",
    "records": "unit/lifecycle/test_states.py unit/workspace/test_stats.py",
    "request_context": "http/test_request_log.py unit/engine/test_replay.py",
    "serve": "process/test_signals.py process/test_early_signals.py",
    "settings": "unit/settings/test_groups.py unit/test_cli.py",
    "settings.limits": "unit/settings/test_groups.py http/test_limits.py",
    "settings.listen_flags": "unit/test_cli.py",
    "settings.supervision": "unit/settings/test_groups.py unit/settings/test_recycling.py",
    "settings.variable_names": "unit/test_cli.py unit/doctor/test_checks.py",
    "settings.yaml_files": "unit/test_cli.py unit/doctor/test_manifest_checks.py",
    "status_page.page": "http/test_status_page.py",
    "status_page.shell": "http/test_status_page.py",
    "status_page.stream": "http/test_status_page.py",
    "telemetry.vllm_gauges": "contract/test_vllm_metrics.py",
    "verify.abilities": "unit/verify/test_survey.py",
    "verify.check": "unit/verify/test_command.py",
    "verify.checks.chat.judges": "unit/verify/test_chat.py",
    "verify.checks.chat.matrix": "unit/verify/test_chat.py",
    "verify.checks.chat.repeats": "unit/verify/test_chat.py",
    "verify.checks.oracle.dates": "unit/verify/test_oracle.py",
    "verify.checks.skill.arithmetic": "unit/verify/test_skill.py",
    "verify.checks.skill.confined": "unit/verify/test_sandbox.py",
    "verify.checks.skill.own_tasks": "unit/verify/test_skill.py",
    "verify.checks.skill.programs": "unit/verify/test_skill.py",
    "verify.checks.soak.canary": "unit/verify/test_soak.py",
    "verify.checks.soak.driving": "unit/verify/test_soak.py",
    "verify.checks.soak.history": "unit/verify/test_soak.py",
    "verify.checks.soak.latency": "unit/verify/test_soak.py",
    "verify.checks.soak.looks": "unit/verify/test_soak.py",
    "verify.checks.soak.memory": "unit/verify/test_soak.py",
    "verify.checks.soak.mix": "unit/verify/test_soak.py",
    "verify.checks.soak.talk": "unit/verify/test_soak.py",
    "verify.checks.survive.asking": "unit/verify/test_survive.py",
    "verify.checks.survive.death": "unit/verify/test_survive.py",
    "verify.checks.survive.limits": "unit/verify/test_survive.py",
    "verify.checks.survive.overload": "unit/verify/test_survive.py",
    "verify.checks.tools.asking": "unit/verify/test_tools.py",
    "verify.checks.tools.calls": "unit/verify/test_tools.py",
    "verify.checks.tools.form": "unit/verify/test_tools.py",
    "verify.checks.tools.keywords": "unit/verify/test_tools.py",
    "verify.checks.tools.parser": "unit/verify/test_tools.py",
    "verify.checks.tools.probe": "unit/verify/test_tools.py",
    "verify.checks.tools.replay": "unit/verify/test_tools.py",
    "verify.checks.tools.scenes": "unit/verify/test_tools.py",
    "verify.checks.tools.schemas": "unit/verify/test_tools.py",
    "verify.checks.oracle.comparing": "unit/verify/test_oracle.py",
    "verify.checks.oracle.permutation": "unit/verify/test_oracle.py",
    "verify.checks.oracle.recording": "unit/verify/test_oracle.py",
    "verify.checks.self_agreement.adapters": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.batches": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.contexts": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.decodes": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.judging": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.needles": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.repeats": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.restarts": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.sampling": "unit/verify/test_self_agreement.py",
    "verify.checks.self_agreement.sequences": "unit/verify/test_self_agreement.py",
    "verify.checks.asking": "unit/verify/test_wire.py",
    "verify.checks.wire.counts": "unit/verify/test_wire.py",
    "verify.checks.wire.endings": "unit/verify/test_wire.py",
    "verify.checks.wire.forms": "unit/verify/test_wire.py",
    "verify.checks.wire.heads": "unit/verify/test_wire.py",
    "verify.checks.wire.messages": "unit/verify/test_wire.py",
    "verify.checks.wire.refusals": "unit/verify/test_wire.py",
    "verify.checks.wire.responses": "unit/verify/test_wire.py",
    "verify.checks.wire.routes": "unit/verify/test_wire.py",
    "verify.checks.wire.twins": "unit/verify/test_wire.py",
    "verify.course": "unit/verify/test_survive.py unit/verify/test_soak.py",
    "verify.records": "unit/verify/test_report.py unit/verify/test_command.py",
    "verify.report.as_json": "unit/verify/test_report.py unit/verify/test_diff.py",
    "verify.report.charts": "unit/verify/test_report.py",
    "verify.report.in_toto": "unit/verify/test_report.py",
    "verify.report.junit": "unit/verify/test_report.py",
    "verify.report.markdown": "unit/verify/test_report.py",
    "verify.report.page": "unit/verify/test_report.py",
    "verify.report.wording": "unit/verify/test_report.py",
    "verify.trial": "unit/verify/test_command.py",
    "worker.agreement": "gpu_paths/test_collectives.py gpu_paths/test_fitted_length.py",
    "worker.hooks": "gpu_paths/test_collectives.py gpu_paths/test_given_kv_cache.py",
    "worker.plugin": "process/test_engine_ends.py engine/test_lock_bug.py",
    "worker.steps": "gpu_paths/test_steps.py",
    "workspace.growth": "unit/workspace/test_manager.py gpu_paths/test_growth_limit.py",
    "workspace.stats.layout": "unit/workspace/test_stats.py unit/workspace/test_stats_torn.py",
    "workspace.stats.reader": "unit/workspace/test_stats.py unit/workspace/test_stats_torn.py",
    "workspace.stats.writer": "unit/workspace/test_stats.py unit/workspace/test_stats_torn.py",
}
"""By module, the tests that drive it through a socket, a process, vLLM or the modules above it."""


def module_name(path: Path) -> str:
    """The module at `path`, below holdfast; a package has the name of its directory."""
    return ".".join(path.relative_to(SERVER).with_suffix("").parts).removesuffix(".__init__")


def long_modules() -> set[str]:
    """Every module that needs tests of its own, or a line in the list; the map is only prose."""
    return {
        module_name(path)
        for path in SERVER.rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) >= LEAST_LINES
        if path.parent != SERVER or path.name != "__init__.py"
    }


def has_own_test(module: str) -> bool:
    """Whether a unit test has the module's name: of `a.b.c` it is `a/test_c` or `a/test_b_c`."""
    package, _, name = module.rpartition(".")
    folder = TESTS / "unit" / package.partition(".")[0]
    names = {name, "_".join(module.split(".")[1:])}
    return any((folder / f"test_{one}.py").exists() for one in names)


def test_every_module_has_a_unit_test_of_its_name_or_a_line_in_the_list() -> None:
    """A newcomer finds the tests of a module by its name."""
    untested = {module for module in long_modules() if not has_own_test(module)}
    assert untested - DRIVEN_ELSEWHERE.keys() == set()


def test_every_line_of_the_list_is_needed() -> None:
    """A module in the list exists, is long, and has no unit test of its name."""
    needed = {module for module in long_modules() if not has_own_test(module)}
    assert DRIVEN_ELSEWHERE.keys() - needed == set()


def test_every_test_in_the_list_exists() -> None:
    """A test that is moved is moved in the list, too."""
    named = {path for paths in DRIVEN_ELSEWHERE.values() for path in paths.split()}
    assert {path for path in named if not (TESTS / path).is_file()} == set()
