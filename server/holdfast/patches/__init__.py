"""Every change to vLLM's own code. Runs in the front end and in vLLM's processes."""
