"""Is it up? This package holds the state of the server, and everything that changes it.

Runs in the front end, and knows vLLM only through `engine.interface`.

    supervisor                starts the engine, has it proven, restarts it and ends it
    states                    the states, and the only moves between them
    host                      what the supervisor needs from outside
    proof                     runs the suite until a pass succeeds, or says why none does
    learning                  is another start worth it, with what the last one learned?
    start_times               how long a start takes
    death_task                when does a generation end?
    death_handler             how did it end, and when does the next one start?
    service                   what a proven engine may be asked for while it serves
    commands, operations      these commands and their results; carries them out one at a time
    recycling                 when is an engine replaced although nothing is wrong with it?
    memory_relief             what is done when the host runs out of memory
"""
