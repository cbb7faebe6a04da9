// One request from Node, without generated code: npm install
// node generate.js PROTOS ENDPOINT PROMPT   (PROTOS is the folder `protos` of the repository, or of the wheel)
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, endpoint, text] = process.argv.slice(2);
const { octavo } = grpc.loadPackageDefinition(
  loader.loadSync("octavo/v1/generation.proto", { includeDirs: [protos], keepCase: true, longs: Number }),
);
const client = new octavo.v1.Generation(endpoint, grpc.credentials.createInsecure());

const stream = client.Generate({
  text,
  sampling: { max_tokens: 16, temperature: 0 },
  terms: { deadline_ms: 60_000 },
});
stream.on("data", (event) => {
  if (event.delta) process.stdout.write(event.delta.text);
  if (event.finished) console.log(`\n${event.finished.usage.completion_tokens} tokens`);
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
