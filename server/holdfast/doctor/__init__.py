"""What would go wrong here, before anything is started: `holdfast doctor`.

machine.py      reads this machine once, into a frozen record
host_memory.py  the part of it that vLLM's build for CPUs looks at
layout.py       reads from the flags what a check needs of vLLM's
deployments.py  the record of a container that a manifest asks for
manifests.py    reads files into such records: compose.py those of Compose, pods.py Kubernetes'
words.py        which program a container runs, and with which arguments
checks.py       pure: record of the machine -> findings
gpu_checks.py   those about GPUs
shared_memory.py  that about /dev/shm, of a machine or a container
front_checks.py  tries keys, certificate and address as a start does
manifest_checks.py  pure: record of a deployment -> findings
probe_checks.py  those about probes
command.py      the flags, the order, the exit code
"""
