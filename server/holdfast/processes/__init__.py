"""The engine's processes, from outside: how they start, die and are cleaned up.

Runs in the front end and in a follower; `forkserver`, `preloaded`, `imports` and `exits` also run
in the process that forks engines.

    forkserver              starts the engine's processes from one that has imported vLLM
    preloaded               prepares that process
    forked_calls            calls a function in a process that it forks
    imports                 imports vLLM faster
    environment             the environment of new processes, and what binds them for life
    tree, family            keeps track of the engine's processes, and ends them; descendants
    exits, deaths           which processes have ended and how; why a generation has died
    stacks                  the stacks of the engine's processes
    memory, cgroups         how much of the host's memory they hold; which cgroups bound it
    cleanup                 removes what killed processes leave behind
    runtime_directory       the sockets and files of one server, and of dead ones
    signals                 ends this process: the first signal drains it, the second ends it
"""
