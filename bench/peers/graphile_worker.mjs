// graphile-worker; at its best with the batching that its page on performance recommends.
import { load, main } from "./adapter.mjs";

const { run, makeWorkerUtils, Logger } = (await load("graphile-worker")).default;
const logger = new Logger(() => () => {});
const SETTINGS = {
  default: {},
  best: { concurrentJobs: 24, maxPoolSize: 12, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 },
};

await main({
  async setup() {
    const utils = await makeWorkerUtils({ logger });
    await utils.migrate();
    await utils.release();
  },
  async producer() {
    const utils = await makeWorkerUtils({ logger });
    return {
      one: (job) => utils.addJob("counted", job),
      many: (jobs) => utils.addJobs(jobs.map((payload) => ({ identifier: "counted", payload }))),
    };
  },
  async work(setting, handle) {
    await run({ preset: { worker: { logger, ...SETTINGS[setting] } }, taskList: { counted: async (job) => handle(job) } });
  },
});
