need_target() {
  need_command ray "pip install 'ray[default]', the version of the cluster"
@ADDRESS@  # Ray lets these win over --address.
  export RAY_ADDRESS=$ray_address
  unset RAY_API_SERVER_ADDRESS
  if [ "${RAY_AUTH_MODE:-}" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ -z "${RAY_AUTH_TOKEN_PATH:-}" ]; then
    [ -n "${HOME:-}" ] && [ -f "$HOME/.ray/auth_token" ] || die 'RAY_AUTH_MODE is token, but there is no RAY_AUTH_TOKEN'
  fi
}

launch() {
  local code=0
  submission_id=p3o-$run_id
@HOOK_BEFORE@  record start "$run_dir"
  follow ray job submit --address "$ray_address" --submission-id "$submission_id" \
    --runtime-env-json @RUNTIME_ENV@ \
    -- python3 -m relax.entrypoints.train "${arguments[@]}" || code=$?
  conclude "$code"
}

# Ending the client does not end the job.
stop_job() {
  [ -z "$job" ] || ray job stop --address "$ray_address" "$submission_id" >&2 || true
}

after_run() {
@HOOK_AFTER@}
