"""What would go wrong here, before anything is started: `holdfast doctor`.

machine.py      reads this machine once, into a frozen record
layout.py       reads from the flags what a check needs of vLLM's
deployments.py  reads a Compose file or Kubernetes manifests into records
checks.py       pure: record of the machine -> findings
manifest_checks.py  pure: record of a deployment -> findings
command.py      the flags, the order, the exit code
"""
