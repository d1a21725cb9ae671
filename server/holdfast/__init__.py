"""Holdfast: an OpenAI-compatible server around vLLM, READY only once its worst case was served.

The packages, what each answers, and the processes that it runs in, the main one first; its
docstring says which module runs where. In that last column, "engine" means vLLM's processes and
those that start them, also on the node of a follower. The package `engine` is something else: most
of it is the front end's side of one engine. A command is a process of its own, and uses what it
needs of any package.

    cli, serve    from argv to a running server                          front end
    application   makes every object, and ends it                        front end
    follow        from argv to a follower of a server on another node    follower
    settings/     the flags of `serve` and `follow`; how flags are read  all
    listener/     what may a client send before a request is complete?   front end, follower
    api/          which requests are admitted, and how answered?         front end, follower
    status_page/  what does a server show of itself? page and stream     front end
    lifecycle/    is it up? states, supervisor, restarts                 front end
    probe/        is the worst case served?                              front end
    engine/       one vLLM engine, as the front end sees it              front end, engine
    processes/    the engine's processes, from outside                   front end, follower, engine
    host_memory/  ends the engine before the host's memory runs out      front end, follower
    nodes/        how do several nodes run one engine?                   front end, follower
    patches/      every change to vLLM's own code, in one list           front end, engine
    worker/       what runs inside vLLM's processes, around each rank    engine, front end, follower
    workspace/    where does scratch memory come from? may it grow?      engine, front end, follower
    planning/     `holdfast plan`: what would be reserved, and why       command
    doctor/       `holdfast doctor`: what would go wrong here            command
    verify/       `holdfast verify`: is what a server answers right?     command, front end
    top/          `holdfast top`: the page of `status_page` as text      command
    telemetry/    what does the server say? metrics, logs, progress      front end, follower
    demo/         the embedded model                                     engine, front end

The other modules are small. All share `errors`, `labels` (closed sets of values), `records` (what
crosses a process), `request_context` (one request), `atomic_files`, `races` (awaits two things at
once) and `loopback` (addresses of this machine). A start has `early_signals` (they end the process
before it serves) and `hide_keys`. `configuration` fills a `configuration_record` with what the
server was given, and `versions` reads what is installed. Commands have `remote_server` (the address
of a server, and the key for it) and `terminal`; `health_check` is a command for containers.

Four flows cross the packages:

Start
    1. `cli` reads flags, environment and files into `settings`; vLLM is not imported yet.
    2. `application` opens the `listener` with the gate closed: health and metrics answer from here.
    3. `lifecycle.supervisor` has `engine.launch.late_engine` import vLLM, and
       `engine.launch.launcher` start it. `processes.forkserver` forks its processes, and
       `worker.plugin` puts our workspace manager into each of them.
    4. `probe` sends the worst case through the listener; `lifecycle.proof` judges it.
    5. READY: `api.gate` opens.
    6. While it serves, `engine.heartbeat` sends an idle engine a canary, a request for one token.
       With `--verify-baseline`, `engine.baseline` compares its log-probs with the recorded ones, as
       `probe.baseline` did before READY.

Request
    1. `listener.http_connection` reads it, and refuses what exceeds a bound on bytes;
       `listener.bounded_connection` has its deadlines.
    2. The layers of `api` follow: `api.request_log`, `api.cross_origin`, `api.auth`, `api.router`,
       `api.quotas`, `api.limits`, `api.gate`, as `application.Application._layers` stacks them. The
       gate admits the request, queues it or refuses it. `labels.RefusalReason` lists every reason
       for a refusal under the module that decides it, and the modules that refuse without one.
    3. vLLM's own routes parse it (`engine.openai_app`, with `patches`).
    4. `engine.proxy` hands it to `engine.replay`, which gives it to the running generation and,
       if that dies, to the next one. There `engine.checked_llm` refuses what cannot be sent, and
       `engine.requests.sequence_queue` decides when each of its sequences goes to vLLM.
    5. A request can wait in four places: in `api.queue` for capacity, in `engine.replay` while
       there is no engine, in `engine.requests.long_prompts` while the host is short of memory, and
       in `engine.requests.sequence_queue` until it is the turn of its sequence.
    6. The answer goes back the same way.

Memory
    1. `workspace.reservers` declare what a model needs; `workspace.plan` adds it up.
    2. `worker.hooks` reserves it before vLLM sizes the KV cache, and locks it after warm-up. With
       `--max-model-len auto`, `worker.agreement` computes how much memory the KV cache may get, and
       the ranks agree on the longest context that fits.
    3. `workspace.manager` hands out views, and grows alongside where the policy allows it.
    4. `workspace.stats` keeps what a rank counts, a `records.RankStats`, in a file that outlives
       the process; its docstring says what a new number of a rank needs.
    5. `telemetry.collector` exports the ranks' numbers as `telemetry.metrics` lists them.

Failure
    1. `processes.exits`, the ranks' own records, `engine.heartbeat`, `engine.requests.aborts`
       (aborts that nobody asked for) or `nodes.remote_ranks` (on other nodes) notice that the
       engine is lost; `processes.deaths` says why. `host_memory.guard` ends it itself, when the
       host runs out of memory; before that `lifecycle.memory_relief` has long prompts wait, or
       gives them up.
    2. `engine.suspects.blame` decides which requests to suspect; `engine.replay` keeps the others.
    3. `lifecycle.death_handler` records it, moves to RECOVERING, and decides whether and when to
       start again; `engine.launch.launcher` has the processes killed and cleaned up.
    4. `lifecycle.learning` decides what the next generation reserves.
    5. The next generation starts as above and is proven. Suspects are tried in it, each alone, as
       `engine.suspects.trials` orders and `engine.suspects.trial_runner` runs them. It serves if it
       outlives them, and gets the requests that were kept.

The flags of the other commands are declared where each command is: in `verify.command`,
`verify.diff`, `doctor.command`, `top.command` and `planning`. `nodes.command_line` adds those that
only `follow` has. `settings` says what a new flag of `serve` needs.

Imports go one way; `tests/project/test_imports.py` holds the order. Only engine, workspace, worker,
patches, planning and demo import vLLM.
"""

__version__ = "0.1.0"
