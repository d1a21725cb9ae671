"""Checks clients' grammars (`response_format`, tools, ...) in processes that may die of them.

Runs in the front end. vLLM compiles a grammar in the front end, to check it, and in EngineCore, to
use it, with native code that a client can crash or keep busy for hours. So a worker process
compiles each one first, with limits on time and memory. Only what survives goes on to vLLM; the
rest gets 400.

    checker    decides about a grammar: known, tried, refused
    text       is what a grammar is known by
    lanes      order the trials of all keys
    pool       starts the worker processes and talks to them
    reaper     ends them, and leaves nothing of them
    workers    runs in them: one process that has the tokenizer, and the workers that it forks
    compiler   compiles in a worker what vLLM's front end and EngineCore would
    given_up   ends a request whose grammar the engine gave up all the same
    requests   checks what vLLM compiles in the front end before a request has parameters
"""
