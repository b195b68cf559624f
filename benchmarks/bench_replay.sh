#!/usr/bin/env bash
# Tokens per step on recorded agent runs, at equal numbers of verified nodes (docs/reference/performance.md).
#
#   benchmarks/bench_replay.sh FOLDER [--json FILE] [options of precedent replay, for instance --limit 40]
#
# FOLDER (or PRECEDENT_TRACES) contains tau_airline.jsonl.gz and tau_retail.jsonl.gz, OpenAI-format runs with `order`
# and `group` (the customer), and splits.json, whose list `test` names the customers that are measured. Each pool takes
# about ten minutes for airline, hours for retail; --limit N measures the first N turns only. RESULTS (default:
# results/replay in the current folder) receives JSON and pages; FILES and POOLS choose what is replayed.
set -euo pipefail

folder=${PRECEDENT_TRACES:-}
if [[ $# -gt 0 && $1 != -* ]]; then
  folder=$1
  shift
fi
figures=() options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    --json) figures=(--json "${2:?--json takes a file}"); shift 2 ;;
    *) options+=("$1"); shift ;;
  esac
done
results=${RESULTS:-results/replay}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
[[ -z ${PYTHON:-} && -x $here/../.venv/bin/python ]] && python=$here/../.venv/bin/python

refuse() {
  echo "error: $1" >&2
  exit 2
}

[[ -n $folder ]] || refuse "name the folder with the traces: benchmarks/bench_replay.sh FOLDER, or set PRECEDENT_TRACES"
[[ -f $folder/splits.json ]] || refuse "$folder contains no splits.json (a JSON object whose list 'test' names customers)"
for file in ${FILES:-tau_airline tau_retail}; do
  [[ -f $folder/$file.jsonl.gz ]] || refuse "$folder contains no $file.jsonl.gz; FILES=... chooses others"
done

load=$("$python" -c "import os; print(os.getloadavg()[0])")
written=()
for file in ${FILES:-tau_airline tau_retail}; do
  for pool in ${POOLS:-online same-task other-tasks}; do
    name=$file-$pool
    mkdir -p "$results/$name"
    written+=("$results/$name.json")
    echo "== $file, pool $pool, test customers only" >&2
    "$python" -c "from precedent.cli.app import main; main()" replay "$folder/$file.jsonl.gz" \
      --pool "$pool" --groups "$folder/splits.json" --split test \
      --budget 8,32 --alpha 1,4,8 --curve flat,cpu \
      --json "$results/$name.json" --html "$results/$name/page.html" \
      ${options[@]+"${options[@]}"}
  done
done
"$python" "$here/replay_figures.py" "${written[@]}" ${figures[@]+"${figures[@]}"} \
  --load "$load" --command "${FILES:+FILES=$FILES }${POOLS:+POOLS=$POOLS }benchmarks/bench_replay.sh FOLDER${options[*]:+ ${options[*]}}"
