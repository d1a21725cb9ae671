"""What would go wrong here, before anything is started: `holdfast doctor`.

machine.py      reads this machine once, into a frozen record
host_memory.py  the part of it that vLLM's build for CPUs looks at
layout.py       reads from the flags what a check needs of vLLM's
deployments.py  reads a Compose file or Kubernetes manifests into records
checks.py       pure: record of the machine -> findings
front_checks.py  tries keys, certificate and address as a start does
gpu_checks.py   those about GPUs
shared_memory.py  that about /dev/shm, of a machine or a container
manifest_checks.py  pure: record of a deployment -> findings
command.py      the flags, the order, the exit code
"""
