#!/usr/bin/env bash
# Ask the same long question twice and print the time to the first byte of each answer.
set -euo pipefail
PORT=${PORT:-8000}

words=$(printf 'The cellar keeps what the year has made. %.0s' {1..150})
for round in 1 2; do
  seconds=$(curl -sS -o /dev/null -w '%{time_starttransfer}' \
    "http://localhost:$PORT/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\":\"model\",\"prompt\":\"$words\",\"max_tokens\":1}")
  echo "round $round: $seconds s"
done
