#!/bin/sh
# vllm-router (https://github.com/vllm-project/router) in front of replicas of Holdfast:
#
#     pip install vllm-router==0.1.17
#     deploy/routers/vllm-router.sh http://10.0.0.1:8000 http://10.0.0.2:8000
#
# What follows the URLs is passed on, and the last value of a flag wins.
set -eu

set -- --worker-urls "$@"

# Prompts with a common beginning go to the replica that has it in its KV cache.
set -- --policy cache_aware "$@"

# By default the router ends if no replica is ready within ten minutes, and asks every 30 s.
set -- --worker-startup-timeout-secs 3600 --worker-startup-check-interval 5 "$@"

# By default every answer ends after half an hour, also a stream.
set -- --request-timeout-secs 86400 "$@"

# Two failures five seconds apart take a replica out, and two successes bring it back. By default
# that takes three minutes. /readyz is 200 only in READY; /health is 200 in SLEEPING too.
set -- --health-check-endpoint /readyz --health-check-interval-secs 5 \
    --health-failure-threshold 2 --health-success-threshold 2 "$@"

# cache_aware tries the same replica again until its circuit opens. That must happen before the five
# attempts of a request are used up, and by default takes ten failures. 429 does not count as one.
set -- --cb-failure-threshold 2 --cb-success-threshold 1 --cb-timeout-duration-secs 5 "$@"

exec vllm-router --host 0.0.0.0 --port 30000 "$@"
