need_target() {
  launcher=${P3O_LAUNCH:-p3o-launch}
  need_command "$launcher" "pip install 'p3o-launch[runtime]', or set P3O_LAUNCH"
}

launch() {
  local code=0
  export "${environment[@]}"
  follow "$launcher" run-resolved "$run_dir" -- "${arguments[@]}" || code=$?
  conclude "$code"
}

stop_job() {
  [ -z "$job" ] || kill -TERM "$job" 2>/dev/null || true
}

# The launcher runs logging.post_command.
after_run() {
  :
}
