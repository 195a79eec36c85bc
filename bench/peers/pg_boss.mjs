// pg-boss; at its best with large batches that follow one another, and woken by NOTIFY.
import { load, main } from "./adapter.mjs";

const { PgBoss } = await load("pg-boss");
const BEST = { batchSize: 1000, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
const isBest = process.env.PGQUEUE_BENCH_SETTING === "best";

async function open(options) {
  const boss = new PgBoss({ host: process.env.PGHOST, port: Number(process.env.PGPORT), user: process.env.PGUSER, database: process.env.PGDATABASE, ...options });
  boss.on("error", (error) => console.error(String(error)));
  await boss.start();
  return boss;
}

await main({
  async setup() {
    const boss = await open({});
    await boss.createQueue("counted", isBest ? { notify: true } : {});
    await boss.stop({ graceful: false });
  },
  async producer() {
    const boss = await open({ supervise: false, schedule: false });
    return {
      one: (job) => boss.send("counted", job),
      many: (jobs) => boss.insert("counted", jobs.map((data) => ({ data }))),
    };
  },
  async work(setting, handle) {
    const boss = await open(isBest ? { useListenNotify: true } : {});
    await boss.work("counted", isBest ? BEST : {}, async (jobs) => jobs.forEach((job) => handle(job.data)));
    process.on("SIGTERM", () => boss.stop({ graceful: true, timeout: 3000 }).catch(() => {}).finally(() => process.exit(0)));
  },
});
