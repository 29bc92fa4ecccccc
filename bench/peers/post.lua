-- wrk script: the same POST over and over; the result as one JSON line behind the word RESULT.
-- Environment: WRK_BODY (a file), WRK_TYPE (Content-Type), WRK_HEADER_BYTES (binary extension, may be empty).
local file = assert(io.open(os.getenv("WRK_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
wrk.headers["Content-Type"] = os.getenv("WRK_TYPE")
local header_bytes = os.getenv("WRK_HEADER_BYTES")
if header_bytes and header_bytes ~= "" then
  wrk.headers["Inference-Header-Content-Length"] = header_bytes
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "seconds": %.6f, "p50_us": %.1f, "p90_us": %.1f, "p99_us": %.1f, "refused": %d, "broken": %d, "timeouts": %d}\n',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(90), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write, errors.timeout))
end
