"""One vLLM engine, as the front end sees it: starting it, asking it, outliving it.

Runs in the front end, except `node_ranks` and `node_executor`, which run a follower's ranks in a
process of its own. `interface` is what the rest of the server may ask of it.

Starting it:

    late_engine              the engine before and after vLLM is imported
    arguments, unsupported   the command line, by vLLM's own parser; what of it is refused
    model_files              the files that it names: template, adapters, tokenizer, weights
    configure                the configuration and the launcher that follow from it
    facts, identity          what probe and supervisor need of it; which files the model is
    launcher                 starts one generation after another
    startup, construction    one start, and why it fails; vLLM's constructor, in a thread
    hung_start               notices a start that hangs
    device_memory            waits for the memory of the engine before
    head_node                which other nodes may join, and what each is told
    node_ranks               the process of a follower's ranks; there `node_executor` runs them

Asking it:

    interface, async_engine  what it may be asked; one generation that answers, vLLM's AsyncLLM
    openai_app, proxy        vLLM's routes, and the client of the engine that they keep
    checked_llm, sizes       refuses what cannot be sent to it; how large prompts are
    sequence_queue           which sequence it gets next
    grammars/, media/        the grammars and the media of requests, within bounds
    loras, worker_adapters   the LoRA adapters of all generations; the same in all workers of one
    rpc, maintenance         calls with a deadline; what an operator has one generation do
    baseline                 does it still compute what was recorded?
    load, request_progress   how many requests it has, and how far each has come
    unread_tokens            what it has done for requests whose callers left
    outputs, vllm_errors     reads vLLM's outputs; turns errors of vLLM into ours, and back

Outliving it:

    heartbeat                does it make progress? its ranks' files tell
    replay                   gives requests to the next generation when one has died
    request, arrivals        one request, its turn, and counts of lost ones; its ID
    continuation             lets an engine go on with an answer that another one began
    aborts                   tells an abort that was asked for from one by an engine that ends
    presence, departed       the requests that it had when it died; those that had left before
    blame, digests           which request ended it; by what another one like it is known
    trials, trial_runner     suspects, tried in the next engine
    suspicions               what ended engines; `suspicion_files` share it between servers
    long_prompts             which prompts give way while the host is short of memory
"""
