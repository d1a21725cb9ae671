"""Holdfast: an OpenAI-compatible server around vLLM whose green light is true.

The packages, what each answers, and the process that it runs in. "both" means the front end and
vLLM's processes for `patches`, and otherwise the front end and a follower, which runs only parts of
the package:

    cli, serve    from argv to a running server; `application` makes every object        front end
    follow        from argv to a running follower of a server on another node            follower
    settings/     everything that can be set                                             all
    listener/     what may a client send before its request is complete?                 both
    api/          which requests are admitted, and how are they answered?                both
    status_page/  what does a server show of itself? the page, its stream and history    front end
    lifecycle/    is it up? states, supervisor, restarts                                 front end
    probe/        is the worst case served?                                              front end
    engine/       one vLLM engine, as the front end sees it; the ranks of a follower     both
    processes/    the engine's processes, from outside                                   both
    host_memory/  how much memory has the host left? ends the engine before it freezes   both
    nodes/        how do several nodes run one engine? protocol of head and follower     both
    patches/      every change to vLLM's own code, in one list                           both
    worker/       what runs inside vLLM's processes, around each rank                    engine
    workspace/    where does scratch memory come from, and when may it grow?             engine
    planning/     `holdfast plan`: what would be reserved, and why                       command
    doctor/       `holdfast doctor`: what would go wrong here                            command
    verify/       `holdfast verify`: is what a server answers right?                     command
    top/          `holdfast top`: the screen of `status_page` in a terminal              command
    telemetry/    what does the server say? metrics, logs, progress                      both
    demo/         the embedded model                                                     engine

Four flows cross them:

Start
    1. `cli` reads flags, environment and files into `settings`; vLLM is not imported yet.
    2. `application` opens the `listener` with the gate closed: health and metrics answer from here.
    3. `lifecycle.supervisor` has `engine.late_engine` import vLLM, and `engine.launcher` start it.
       `processes.forkserver` forks its processes, and `worker.plugin` puts our workspace manager
       into each of them.
    4. `probe` sends the worst case through the listener; `lifecycle.proof` judges it.
    5. READY: `api.gate` opens.

Request
    1. `listener.http_connection` reads it, and refuses what exceeds a bound on bytes;
       `listener.bounded_connection` has its deadlines.
    2. The layers of `api` follow: `api.request_log`, `api.cross_origin`, `api.auth`, `api.router`,
       `api.quotas`, `api.limits`, `api.gate`, as `application.Application._layers` stacks them. The
       gate admits the request, queues it or refuses it. `labels.RefusalReason` lists every reason
       for a refusal under the module that decides it, and the modules that refuse without one.
    3. vLLM's own routes parse it (`engine.openai_app`, with `patches`).
    4. `engine.proxy` hands it to `engine.replay`, which gives it to the running generation and,
       if that dies, to the next one.
    5. The answer goes back the same way.

Memory
    1. `workspace.reservers` declare what a model needs; `workspace.plan` adds it up.
    2. `worker.hooks` reserves it before vLLM sizes the KV cache, and locks it after warm-up.
    3. `workspace.manager` hands out views, and grows alongside where the policy allows it.
    4. `workspace.stats` keeps what a rank counts, a `records.RankStats`, in a file that outlives
       the process; its docstring says what a new number of a rank needs.
    5. `telemetry.collector` exports the ranks' numbers as `telemetry.metrics` lists them.

Failure
    1. `processes.exits`, the ranks' own records or `engine.heartbeat` notice that the engine is
       lost; `processes.deaths` says why. `host_memory.guard` ends it itself, when the host runs out
       of memory; before that `lifecycle.memory_relief` has long prompts wait, or gives them up.
    2. `engine.blame` decides which requests to suspect; `engine.replay` keeps the others.
    3. `lifecycle.death_handler` records it, moves to RECOVERING, and decides whether and when to
       start again; `engine.launcher` has the processes killed and cleaned up.
    4. `lifecycle.learning` decides what the next generation reserves.
    5. The next generation starts as above, is proven, and gets the requests that were kept.

Imports go one way; `tests/project/test_imports.py` holds the order. Only engine, workspace, worker,
patches, planning and demo import vLLM.
"""

__version__ = "0.1.0"
