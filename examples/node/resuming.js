// A request that outlives its scheduler: what docs/resuming.md says, in Node and without generated code.
// npm install && node resuming.js PROTOS ENDPOINT[,ENDPOINT...] PROMPT [CHOICES] [SEED]
// Prints one JSON object for each piece of text, and in the end all of it.
const { randomUUID } = require("node:crypto");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const FIRST_DELAY_MS = 50;
const MAX_DELAY_MS = 1000;
const PATIENCE_MS = 60_000; // How long trouble may last without any output.
const MAY_BE_SENT_AGAIN = [
  grpc.status.OK, // The stream ended, and not all choices had.
  grpc.status.UNAVAILABLE, // Also DRAINING and NO_WORKER.
  grpc.status.CANCELLED, // Not by us.
  grpc.status.INTERNAL,
  grpc.status.UNKNOWN,
  grpc.status.ABORTED,
];
const CHANNEL_OPTIONS = {
  // A scheduler that stands still ends no connection; this finds it.
  "grpc.keepalive_time_ms": 2000,
  "grpc.keepalive_timeout_ms": 3000,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
};

function connect(protos, endpoints) {
  const { octavo } = grpc.loadPackageDefinition(
    loader.loadSync("octavo/v1/generation.proto", {
      includeDirs: [protos],
      keepCase: true,
      defaults: true, // Choice 0 is a 0, and not absent.
      longs: String, // A seed has 64 bits, which a Number does not hold.
    }),
  );
  const credentials = grpc.credentials.createInsecure();
  return endpoints.map((endpoint) => new octavo.v1.Generation(endpoint, credentials, CHANNEL_OPTIONS));
}

// What is known of a request whatever becomes of its stream.
class Call {
  constructor(request) {
    this.request = request;
    this.accepted = null;
    this.choices = Array.from({ length: request.sampling.n || 1 }, () => ({ tokens: [], text: "", end: null }));
    this.dueAt = request.terms?.deadline_ms && Date.now() + request.terms.deadline_ms;
    this.attempts = 0;
  }

  get done() {
    return this.choices.every((choice) => choice.end);
  }

  // The request, or what is left of it.
  rest() {
    this.attempts += 1;
    const request = { ...this.request, return_token_ids: true };
    if (this.dueAt) request.terms = { ...request.terms, deadline_ms: Math.max(1, this.dueAt - Date.now()) };
    if (!this.accepted) return request;
    const { seed, prompt_tokens, clamped_max_tokens } = this.accepted;
    request.sampling = { ...request.sampling, seed };
    request.accepted_as = { prompt_tokens, clamped_max_tokens };
    request.resume = this.choices.flatMap(({ tokens, text, end }, choice) => {
      if (end) return [{ choice, finished: true }];
      return tokens.length ? [{ choice, token_ids: tokens, shown_bytes: Buffer.byteLength(text) }] : [];
    });
    return request;
  }

  // Take an event in; return the new text in it, if there is any.
  apply({ accepted, delta, finished }) {
    if (accepted) this.accepted ??= accepted;
    const choice = this.choices[(delta ?? finished)?.choice];
    if (!choice || choice.end) return ""; // What had ended before is told again, and passed over.
    if (finished) choice.end = finished;
    if (!delta) return "";
    choice.tokens.push(...delta.token_ids);
    choice.text += delta.text;
    return delta.text;
  }
}

// Send a request once. Resolves with how its stream ended; never rejects.
function attempt(client, call, onEvent) {
  return new Promise((resolve) => {
    const stream = client.Generate(call.rest());
    stream.on("data", onEvent);
    stream.on("end", () => resolve({ code: grpc.status.OK, details: "the stream ended" }));
    stream.on("error", resolve);
  });
}

async function generate(clients, request, onText) {
  const call = new Call(request);
  let [next, delay, troubleSince] = [0, FIRST_DELAY_MS, null];
  for (;;) {
    const error = await attempt(clients[next % clients.length], call, (event) => {
      const text = call.apply(event);
      if (event.delta) [delay, troubleSince] = [FIRST_DELAY_MS, null];
      if (text) onText(event.delta.choice, text);
    });
    if (call.done) return call;
    troubleSince ??= Date.now();
    const late = Date.now() - troubleSince > PATIENCE_MS || (call.dueAt && Date.now() > call.dueAt);
    // Another end than UNAVAILABLE that the scheduler gave itself is its last word: POISON is ABORTED, too.
    const said = error.code !== grpc.status.UNAVAILABLE && error.metadata?.get("octavo-error-bin").length;
    if (late || said || !MAY_BE_SENT_AGAIN.includes(error.code)) throw error;
    next += 1;
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(2 * delay, MAX_DELAY_MS);
  }
}

async function main() {
  const [protos, endpoints, text, n = "1", seed] = process.argv.slice(2);
  const clients = connect(protos, endpoints.split(","));
  const sampling = { n: Number(n), max_tokens: 256, temperature: 0.7, ignore_eos: true, ...(seed && { seed }) };
  const request = { request_id: randomUUID(), text, sampling };
  const call = await generate(clients, request, (choice, piece) => console.log(JSON.stringify({ choice, text: piece })));
  console.log(JSON.stringify({ texts: call.choices.map((choice) => choice.text), attempts: call.attempts }));
  for (const client of clients) client.close();
}

main().catch((error) => {
  console.error(`${grpc.status[error.code] ?? error.name}: ${error.details ?? error.message}`);
  process.exitCode = 1;
});
