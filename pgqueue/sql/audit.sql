-- Who did what to the queue. The entries are written by the database's functions and triggers.

-- name: act_as
-- Until the end of the transaction: who is behind what it does.
SELECT set_config('pgqueue.actor', %(actor)s::text, true);

-- name: entries
-- The latest entries that match, the latest first. An action is one, or all of a kind: 'queue' is 'queue.pause' too.
SELECT
    entry.id,
    entry.at,
    entry.action,
    entry.subject,
    entry.jobs,
    entry.role,
    entry.actor,
    entry.application,
    host(entry.address),
    entry.session_pid,
    entry.details::text,
    clock_timestamp()
FROM {{schema}}.audit_log AS entry
WHERE (%(action)s::text IS NULL
       OR entry.action = %(action)s::text
       OR starts_with(entry.action, %(action)s::text || '.'))
  AND (%(subject)s::text IS NULL OR entry.subject = %(subject)s::text)
  AND (
      %(within_seconds)s::double precision IS NULL
      OR entry.at >= clock_timestamp() - make_interval(secs => %(within_seconds)s::double precision)
  )
ORDER BY entry.id DESC
LIMIT %(limit)s::integer;

-- name: prune
-- Forget some of the entries that are older than that; gives how many they were.
SELECT {{schema}}.prune_audit_log(%(older_than_seconds)s::double precision);
