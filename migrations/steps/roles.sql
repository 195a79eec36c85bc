-- Four roles that nobody logs in as: give them to those who do. Whoever owns the schema runs this, or a superuser;
-- again after every `pgqueue migrate` it does no harm, and it is not needed: that gives the same grants anew.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY '{{{schema}}_producer, {{schema}}_worker, {{schema}}_viewer, {{schema}}_operator}'::text[] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
        END IF;
    END LOOP;
END $$;
