"""How much memory does the host have left, and when must the engine give way?

Runs in the front end, and in a follower for the memory of its own host.

    guard       watches the memory in a thread, and ends the engine
    reader      reads how much is left, on the host and in each cgroup
    kept_files  reads small files of the kernel without needing memory
"""
