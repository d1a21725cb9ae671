"""What runs inside vLLM's processes, around each rank.

The front end and a follower, from outside, read what `crash_records` and `step_requests` have
written, and find files by `ipc_names`. `lifetime` is for them and for the fork server, too.

    plugin         the entry point that vLLM loads in every process
    hooks          follows a worker from its device to its lock, and through every step
    agreement      all ranks agree while an engine starts; how much the KV cache gets with
                   `--max-model-len auto`
    steps          the steps of a rank, each from its launch to its output
    step_requests  which requests were in the steps that ended an engine
    nan_rows       counts rows of logits with a NaN
    rpc, adapters  the front end's calls of a worker; loads LoRA adapters for it
    crash_records  why a process of the engine failed
    lifetime       ends processes with their parent
    ipc_names      names shared memory and semaphores after their engine
"""
