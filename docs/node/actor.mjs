// An actor for a seedrl learner in JavaScript, with environments of its own (cartpole.mjs).
//
//     seedrl learner env=own listen=127.0.0.1:50051 stop.env_steps=1e6
//     npm install && node actor.mjs 127.0.0.1:50051
//
// It is written from proto/seedrl/v1/inference.proto; the rules named below are the rules there. A token is read from
// SEEDRL_TOKEN, a CA to trust from SEEDRL_CA (a PEM file), the path of the proto from SEEDRL_PROTO.

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { CartPole } from "./cartpole.mjs";

const TERMINATED = 1, TRUNCATED = 2, RESET = 4; // flags of a row
const PROTOCOL_VERSION = 3;
const PATIENCE = 60; // seconds for which it looks for a learner that has gone
const WORTH_RETRYING = new Set([
  grpc.status.UNAVAILABLE, grpc.status.RESOURCE_EXHAUSTED, grpc.status.ABORTED, grpc.status.CANCELLED,
  grpc.status.DEADLINE_EXCEEDED, grpc.status.INTERNAL,
]);

const proto = process.env.SEEDRL_PROTO
  ?? fileURLToPath(new URL("../../proto/seedrl/v1/inference.proto", import.meta.url));
const definition = loader.loadSync(proto, { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true });
const { InferenceService } = grpc.loadPackageDefinition(definition).seedrl.v1;

// One session: resolves with why it ended, as { again: whether to join again, why }.
function session(client, epoch) {
  const metadata = new grpc.Metadata();
  if (process.env.SEEDRL_TOKEN) metadata.set("authorization", `Bearer ${process.env.SEEDRL_TOKEN}`);
  const stream = client.Stream(metadata);
  let envs = []; // [{ env, observation, reward, flags }], by environment id
  const groups = new Map(); // request_id → the environments whose rows it has
  let nextRequest = 1, isPaused = false, waiting = []; // groups that wait for the end of a pause

  // Sends the newest rows of some environments. All blobs are little-endian, as every common processor is.
  function step(ids) {
    if (isPaused) return waiting.push(ids);
    const request = nextRequest++; // rule 1: none of these environments has a row in flight
    groups.set(request, ids);
    const rows = ids.map((id) => envs[id]);
    stream.write({
      step: {
        request_id: request,
        env_id: bytes(Int32Array.from(ids)),
        observation: [bytes(Float32Array.from(rows.flatMap((row) => row.observation)))],
        reward: bytes(Float32Array.from(rows.map((row) => row.reward))),
        flags: Uint8Array.from(rows.map((row) => row.flags)),
      },
    });
  }

  function welcome({ num_envs, group_size, seed, protocol_version }) {
    if (protocol_version !== PROTOCOL_VERSION) throw new Error(`the learner has protocol ${protocol_version}`);
    envs = Array.from({ length: num_envs }, (_, id) => reset(new CartPole(seed + id)));
    stream.write({ ready: { observation: [{ shape: [4], dtype: "float32" }], action: [{ choices: [2] }] } });
    for (let first = 0; first < num_envs; first += group_size) {
      step(Array.from({ length: group_size }, (_, index) => first + index));
    }
  }

  function act({ request_id, action }) { // rule 2: it may answer several requests, their rows one after the other
    let at = 0;
    for (const request of request_id.map(Number)) {
      const ids = groups.get(request);
      groups.delete(request);
      for (const id of ids) {
        envs[id] = advance(envs[id], action[0].readInt32LE(4 * at++));
      }
      step(ids);
    }
  }

  return new Promise((resolve) => {
    let left = null; // why, once it was asked to leave
    stream.on("error", (error) => resolve(
      left ?? { again: WORTH_RETRYING.has(error.code), why: `${grpc.status[error.code]}: ${error.details}`, failed: true },
    ));
    stream.on("end", () => resolve(left ?? { again: true, why: "the learner ended the stream" }));
    stream.on("data", (message) => {
      if (message.welcome) welcome(message.welcome);
      else if (message.act && !left) act(message.act);
      else if (message.control) {
        const { command, reason } = message.control;
        if (command === "COMMAND_PAUSE") isPaused = true;
        else if (command === "COMMAND_RESUME") {
          isPaused = false;
          waiting.splice(0).forEach(step);
        } else {
          left = { again: command !== "COMMAND_END", why: reason };
          stream.cancel();
        }
      } // Memory is an offer that this actor does not take (rule 6)
    });
    stream.write({
      hello: { protocol_version: PROTOCOL_VERSION, actor_name: `node-${process.pid}`, instance, epoch, redirects: 3 }, // rule 12
    });
  });
}

const reset = (env) => ({ env, observation: env.reset(), reward: 0, flags: RESET });

// The next row of an environment. The action for a row that ended its episode is ignored: the next row is a RESET.
function advance({ env, flags }, action) {
  if (flags & (TERMINATED | TRUNCATED)) return reset(env);
  const { observation, reward, terminated, truncated } = env.step(action);
  return { env, observation, reward, flags: TERMINATED * terminated | TRUNCATED * truncated };
}

const bytes = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

const instance = randomUUID(); // rule 7
const ca = process.env.SEEDRL_CA;
const client = new InferenceService(
  process.argv[2] ?? "127.0.0.1:50051",
  ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure(),
);
let lost = null; // since when no session has begun
for (let epoch = 1; ; epoch += 1) {
  const began = Date.now();
  const { again, why, failed } = await session(client, epoch);
  console.log(`session ${epoch}: ${why}`);
  if (!again) process.exit(failed ? 1 : 0);
  lost = Date.now() - began > 5000 ? Date.now() : lost ?? began;
  if (Date.now() - lost > PATIENCE * 1000) process.exit(1);
  await sleep(500 + 1000 * Math.random());
}
