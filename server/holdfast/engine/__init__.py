"""One vLLM engine, as the front end sees it: starting it, asking it, outliving it.

Runs in the front end, except two modules of `launch`, which run a follower's ranks in a process of
their own. What these import runs there too. `interface` is what the rest of the server may ask of
it.

Starting it:

    launch/                  from the command line to one generation after another
    model/                   which model it serves, and of what files that is made
    unsupported              which flags and variables ask for what Holdfast cannot do

Asking it:

    interface, async_engine  what it may be asked; one generation that answers, vLLM's AsyncLLM
    openai_app, proxy        vLLM's routes, and the client of the engine that they keep
    checked_llm              refuses what cannot be sent to it
    requests/                what is known of each request, and when it gets its turn
    grammars/, media/        the grammars and the media of requests, within bounds
    loras, worker_adapters   the LoRA adapters of all generations; the same in all workers of one
    rpc, maintenance         calls with a deadline; what an operator has one generation do
    pauses                   the pauses by vLLM's routes, in the order in which they are asked for
    baseline                 does it still compute what was recorded?
    outputs, vllm_errors     reads vLLM's outputs; turns errors of vLLM into ours, and back

Outliving it:

    heartbeat                does it make progress? its ranks' files tell
    replay                   gives requests to the next generation when one has died
    suspects/                which request ended it, and would end the next one as well?
"""
