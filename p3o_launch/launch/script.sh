#!/usr/bin/env bash
# Runs the preset @TITLE@ with the target @TARGET@, as resolved by p3o-launch @VERSION@.
# Complete in itself: checks what is needed, makes a run directory, records the run, launches it, records its end.
# Exit code: the job's; 2 when something needed is missing. Sourced, it defines its functions and runs nothing.
# shellcheck disable=SC2016  # quoted text is meant as it stands
# shellcheck disable=SC1003,SC1110,SC1111,SC1112  # so are backslashes and typographic quotes in it
set -euo pipefail

preset=@NAME@
seed=@SEED@
output_root=@OUTPUT_ROOT@
run_dir=''
job=''
ended=''
interrupted=0

# The resolved arguments. In a function, because some name the run's directory.
set_arguments() {
  arguments=(
@ARGUMENTS@
  )
}

@ENVIRONMENT@write_preset() {
  cat <<'@MARK@'
@PRESET@@MARK@
}

write_facts() {
  cat <<'@FACTS_MARK@'
@FACTS@
@FACTS_MARK@
}

die() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

need_command() {
  command -v -- "$1" >/dev/null || die "$1 is not on PATH: $2"
}

need_file() {
  [ -f "$2" ] || die "$1 does not exist: $2"
}

need_checkpoint() {
  [ -f "$2/config.json" ] || die "$1 is no checkpoint, it holds no config.json: $2"
}

@TARGET_PART@
main() {
  python=${P3O_PYTHON:-python3}
  need_command "$python" 'install Python 3.10 or later, or set P3O_PYTHON'
  need_target
@CHECKS@@PROXIES@  make_run_dir
  set_arguments
  trap on_exit EXIT
  trap 'on_signal' INT TERM HUP
  write_preset >"$run_dir/resolved.yaml"
  if [ -f "${BASH_SOURCE[0]:-}" ]; then
    cat -- "${BASH_SOURCE[0]}" >"$run_dir/command.sh"
    chmod +x -- "$run_dir/command.sh"
  fi
  write_facts >"$run_dir/.facts.json"
  record begin "$run_dir" "$$" "$run_dir/.facts.json" "$0"@BEGIN_EXTRA@ -- "${arguments[@]}"
  rm -f -- "$run_dir/.facts.json"
  printf 'run directory %s\n' "$run_dir" >&2
  launch
}

make_run_dir() {
  local parent attempt
  case $output_root in
    \~ | \~/*)
      [ -n "${HOME:-}" ] || die 'HOME is not set, and logging.output_root starts with ~'
      output_root=$HOME${output_root#?}
      ;;
    /*) ;;
    *) output_root=$PWD/$output_root ;;
  esac
  parent=$output_root/$preset/seed_$seed
  mkdir -p -- "$parent" || die "no run directory can be made in $parent: set logging.output_root"
  # Making the directory is what claims it: two runs never share one.
  for attempt in 1 2 3 4 5; do
    run_id=$(date -u +%Y%m%dT%H%M%SZ)-$(od -An -N3 -tx1 /dev/urandom | tr -d ' \n')
    if mkdir -- "$parent/$run_id" 2>/dev/null; then
      run_dir=$parent/$run_id
      return
    fi
  done
  die "no free run id in $parent after $attempt attempts"
}

# Runs the job in the background, so that a signal reaches this shell at once; the exit code is the job's, not tee's.
follow() {
  local code=0
  [ "$interrupted" = 0 ] || return 130
  "$@" > >(exec tee -i -a -- "$run_dir/logs/launch.log" >&2) 2>&1 &
  job=$!
  wait "$job" || code=$?
  while kill -0 "$job" 2>/dev/null; do
    code=0
    wait "$job" || code=$?
  done
  return "$code"
}

on_signal() {
  interrupted=1
  stop_job
}

on_exit() {
  local code=$?
  trap - EXIT
  if [ -z "$ended" ] && [ -f "$run_dir/run.json" ]; then
    record finish "$run_dir" "$code" "$interrupted" || true
  fi
  exit "$code"
}

# How the run ended, and the job's code as the script's.
conclude() {
  local code=$1
  [ "$interrupted" = 0 ] || [ "$code" = 0 ] || code=130
  record finish "$run_dir" "$code" "$interrupted"
  ended=1
  after_run "$code"
  exit "$code"
}

record() {
  "$python" - "$@" <<'P3O_RECORDER'
@RECORDER@P3O_RECORDER
}

if [ "${BASH_SOURCE[0]:-$0}" = "$0" ]; then
  main
fi
