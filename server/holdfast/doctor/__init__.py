"""`holdfast doctor`: what would go wrong here, before anything is started.

Runs in a process of its own. `command` has the flags, the order of the checks and the exit code.
Every check makes `findings`:

    checks           this machine, its environment, its flags and /dev/shm
    gpu_checks       its GPUs
    front_checks     keys, certificate and address, and what clients may have fetched
    manifest_checks  a container as a manifest describes it
    probe_checks     the probes of such a container
    peer_checks      another node of the same engine
    link_checks      the way to it
    driver_log       what the GPU's driver has complained about

Checks are functions of records: `machine` and `gpus` describe this machine, `links` its network,
`parallelism` the flags of vLLM that a hazard depends on, `deployments` one container, and `peers`
another node. `compose` and `pods` read containers from manifests; `command_line` finds the program
that a container runs. `reach` sends packets to a peer, `asking` asks its health port, and
`peer_status` reads the answer.
"""
