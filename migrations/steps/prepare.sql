-- Nobody else's names may come between.
SET LOCAL search_path = pg_catalog;
-- One migration at a time: the others wait, then find nothing to do. No lock is waited for for ever.
SET LOCAL lock_timeout = '60s';
SELECT pg_advisory_xact_lock(hashtextextended('{{schema}}.migrate', 0));
-- CREATE SCHEMA IF NOT EXISTS would ask for the right to make schemas even where it makes none.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = '{{schema}}') THEN
        CREATE SCHEMA {{schema}};
    END IF;
END $$;
