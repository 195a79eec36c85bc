// What every Node product's adapter does alike: see adapter.py. Run with PGQUEUE_BENCH_MODULES, the folder of the product.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const folder = process.env.PGQUEUE_BENCH_FOLDER;
const COUNTS = 32;

export const load = (name) => {
  const resolve = createRequire(process.env.PGQUEUE_BENCH_MODULES + "/").resolve;
  return import(pathToFileURL(resolve(name)).href);
};

// The clock that all processes of the machine share, in seconds.
const now = () => Number(process.hrtime.bigint()) / 1e9;
const pause = (seconds) => new Promise((done) => setTimeout(done, Math.max(0, seconds * 1000)));

class Recorder {
  constructor() {
    this.file = fs.openSync(path.join(folder, `count.${process.pid}`), "w+");
    this.starts = fs.openSync(path.join(folder, `starts.${process.pid}`), "a");
    this.buffer = Buffer.alloc(COUNTS);
    this.count = 0;
    this.total = 0;
    this.lines = "";
    this.write();
    // There is no shared memory to count in: write it down every now and then.
    setInterval(() => this.write(), 20);
    process.on("exit", () => this.write());
  }
  write() {
    if (this.count === this.written) return;
    this.written = this.count;
    this.buffer.writeBigUInt64LE(BigInt(this.count), 0);
    this.buffer.writeBigUInt64LE(BigInt(this.total), 8);
    this.buffer.writeDoubleLE(this.firstAt ?? 0, 16);
    this.buffer.writeDoubleLE(this.lastAt ?? 0, 24);
    fs.writeSync(this.file, this.buffer, 0, COUNTS, 0);
    if (this.lines) fs.writeSync(this.starts, this.lines);
    this.lines = "";
  }
  hit({ i, sent }) {
    this.lastAt = now();
    this.firstAt ??= this.lastAt;
    this.count++;
    this.total += i;
    if (sent != null) this.lines += `${i} ${sent.toFixed(6)} ${this.lastAt.toFixed(6)}\n`;
  }
}

function seen() {
  let count = 0;
  for (const name of fs.readdirSync(folder)) {
    if (!name.startsWith("count.")) continue;
    const text = fs.readFileSync(path.join(folder, name));
    if (text.length >= COUNTS) count += Number(text.readBigUInt64LE(0));
  }
  return count;
}

async function enqueue(producer, { jobs, batch, pause: seconds }) {
  const beganAt = now();
  if (batch > 1) {
    for (let first = 0; first < jobs; first += batch) {
      const length = Math.min(batch, jobs - first);
      await producer.many(Array.from({ length }, (_, nth) => ({ i: first + nth })));
    }
    return jobs;
  }
  for (let i = 0; i < jobs; i++) {
    if (seconds === undefined) {
      await producer.one({ i });
    } else {
      await pause(beganAt + i * seconds - now());
      await producer.one({ i, sent: now() });
    }
  }
  return jobs;
}

async function flow(producer, { seconds, batch, ahead }) {
  const end = now() + seconds, before = seen();
  let sent = 0;
  while (now() < end) {
    if (sent - (seen() - before) > ahead) {
      await pause(0.002);
      continue;
    }
    if (batch === 1) {
      await producer.one(sent % 20 === 0 ? { i: sent, sent: now() } : { i: sent });
    } else {
      const jobs = Array.from({ length: batch }, (_, nth) => ({ i: sent + nth }));
      jobs[0].sent = now();
      await producer.many(jobs);
    }
    sent += batch;
  }
  return sent;
}

export async function main(adapter) {
  const text = { type: "string" };
  const { positionals: [command], values } = parseArgs({
    allowPositionals: true,
    options: { jobs: text, batch: text, pause: text, seconds: text, ahead: text, setting: text, warm: { type: "boolean" } },
  });
  const { setting, warm, ...numbers } = values;
  const wanted = { ...(command === "flow" ? { batch: 100, ahead: 5000 } : { batch: 1 }) };
  for (const [name, value] of Object.entries(numbers)) wanted[name] = Number(value);
  if (command === "setup") {
    await adapter.setup();
  } else if (command === "worker") {
    const recorder = new Recorder();
    await adapter.work(setting, (job) => recorder.hit(job));
    return;
  } else {
    const producer = await adapter.producer();
    if (warm) await producer.one({ i: 0 });
    const beganAt = now();
    const jobs = await (command === "enqueue" ? enqueue : flow)(producer, wanted);
    console.log(JSON.stringify({ jobs, seconds: now() - beganAt }));
  }
  process.exit(0);
}
