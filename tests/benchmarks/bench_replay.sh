#!/usr/bin/env bash
# The figures of docs/reference/performance.md: tokens per step on recorded agent runs, at equal numbers of verified nodes.
#
#   tests/benchmarks/bench_replay.sh FOLDER [--json FILE] [options of precedent replay, for instance --limit 40]
#
# FOLDER (or PRECEDENT_TRACES) holds tau_airline.jsonl.gz and tau_retail.jsonl.gz, OpenAI-format runs with `order` and
# `group` (the customer), and splits.json, whose list `test` names the customers that are measured. Every pool is
# replayed by itself: about ten minutes in all for airline, hours for retail; --limit N measures the first N turns only.
# RESULTS (results/replay below the current folder) takes the JSON, the pictures and the pages; FILES and POOLS choose.
# --json FILE writes the figures of the page alone.
set -euo pipefail

folder=${PRECEDENT_TRACES:-}
if [[ $# -gt 0 && $1 != -* ]]; then
  folder=$1
  shift
fi
figures=()
options=()
while [[ $# -gt 0 ]]; do
  if [[ $1 == --json ]]; then
    figures=(--json "${2:?--json takes a file}")
    shift 2
  else
    options+=("$1")
    shift
  fi
done
set -- ${options[@]+"${options[@]}"}
files=${FILES:-tau_airline tau_retail}
pools=${POOLS:-online same-task other-tasks}
results=${RESULTS:-results/replay}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
[[ -z ${PYTHON:-} && -x $here/../../.venv/bin/python ]] && python=$here/../../.venv/bin/python

refuse() {
  echo "error: $1" >&2
  exit 2
}

[[ -n $folder ]] || refuse "name the folder with the traces: tests/benchmarks/bench_replay.sh FOLDER, or set PRECEDENT_TRACES"
[[ -f $folder/splits.json ]] || refuse "$folder holds no splits.json (a JSON object whose list 'test' names customers)"
for file in $files; do
  [[ -f $folder/$file.jsonl.gz ]] || refuse "$folder holds no $file.jsonl.gz; FILES=... chooses others"
done

load=$("$python" -c "import os; print(os.getloadavg()[0])")
mkdir -p "$results"
written=()
for file in $files; do
  for pool in $pools; do
    name=$file-$pool
    mkdir -p "$results/$name"
    written+=("$results/$name.json")
    echo "== $file, pool $pool, test customers only" >&2
    "$python" -c "from precedent.cli.app import main; main()" replay "$folder/$file.jsonl.gz" \
      --pool "$pool" --groups "$folder/splits.json" --split test \
      --budget 16,32,64 --alpha 1,4,8 --curve flat,cpu \
      --json "$results/$name.json" --html "$results/$name/page.html" --svg "$results/$name" "$@"
  done
done
"$python" "$here/replay_figures.py" "${written[@]}" ${figures[@]+"${figures[@]}"} \
  --load "$load" --command "tests/benchmarks/bench_replay.sh FOLDER${*:+ $*}"
