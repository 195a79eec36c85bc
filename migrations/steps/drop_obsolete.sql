-- Drop what has gone from functions/*.sql, and what cannot be replaced in place because its arguments or
-- its result changed. No CASCADE: what somebody else has built on it is theirs to change first.
DO $$
DECLARE
    gone text;
BEGIN
    FOR gone IN
        SELECT old.object FROM {{schema}}.definitions AS old
        WHERE NOT EXISTS (
            SELECT FROM (VALUES
                {{objects}}
            ) AS new (object, shape)
            WHERE new.object = old.object AND new.shape = old.shape
        )
        ORDER BY old.object DESC        -- views and triggers before the functions they call
    LOOP
        DELETE FROM {{schema}}.definitions AS old WHERE old.object = gone;
        EXECUTE regexp_replace(gone, '^(\w+)', 'DROP \1 IF EXISTS');
    END LOOP;
END $$;
