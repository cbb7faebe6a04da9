-- Requests of wrk to a gateway: every second one streams.
local model = os.getenv("OCTAVO_MODEL")
local head = { ["content-type"] = "application/json" }
local count = 0

function request()
  count = count + 1
  local stream = count % 2 == 0 and "true" or "false"
  local body = '{"model": "' .. model .. '", "prompt": "Once upon a time", "max_tokens": 4, "stream": ' .. stream .. "}"
  return wrk.format("POST", "/v1/completions", head, body)
end
