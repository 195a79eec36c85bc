// A client in JavaScript: each scenario does its work over `pg` and prints one JSON document.

import pg from "pg";

const client = new pg.Client(); // PGHOST, PGPORT, PGUSER, PGDATABASE

const scenarios = {
  async insert(task, args) {
    const { rows } = await client.query(
      "INSERT INTO pgqueue.jobs (task, args) VALUES ($1, $2) RETURNING id, queue, priority, state",
      [task, JSON.parse(args)],
    );
    return rows[0];
  },

  async enqueue(task, args) {
    const { rows } = await client.query(
      "SELECT pgqueue.enqueue($1, $2, delay_seconds => $3, unique_key => $4) AS id",
      [task, JSON.parse(args), 0, "from-node"],
    );
    return rows[0];
  },

  async enqueueMany(jobs) {
    // pg writes an array as an array of PostgreSQL's; a jsonb parameter wants JSON.
    const { rows } = await client.query("SELECT job_id, outcome FROM pgqueue.enqueue_many($1)", [jobs]);
    return rows;
  },

  async transaction() {
    await client.query("CREATE TABLE orders (id integer)");
    const order = async (id, end) => {
      await client.query("BEGIN");
      await client.query("INSERT INTO orders VALUES ($1)", [id]);
      await client.query("SELECT pgqueue.enqueue('echo', $1)", [{ text: `order ${id}` }]);
      await client.query(end);
    };
    await order(1, "ROLLBACK");
    await order(2, "COMMIT");
    return null;
  },

  async hostile(texts) {
    for (const text of JSON.parse(texts)) {
      await client.query("INSERT INTO pgqueue.jobs (task, args) VALUES ('echo', $1)", [{ text }]);
    }
    return null;
  },

  async refused(query, ...parameters) {
    try {
      await client.query(query, parameters);
    } catch ({ code, constraint, message }) {
      return { code, constraint: constraint ?? null, message };
    }
    return null;
  },
};

const [scenario, ...parameters] = process.argv.slice(2);
await client.connect();
try {
  console.log(JSON.stringify(await scenarios[scenario](...parameters)));
} finally {
  await client.end();
}
