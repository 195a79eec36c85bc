-- A function that was made anew has no grants any more, and new ones never had any. Where the roles are, they get
-- what this version gives them.
DO $renew$ BEGIN
    IF (
        SELECT count(*) FROM pg_roles AS r
        WHERE r.rolname IN ('{{schema}}_producer', '{{schema}}_worker', '{{schema}}_viewer', '{{schema}}_operator')
    ) = 4 THEN
        EXECUTE $grants$
{{grants}}
        $grants$;
    END IF;
END $renew$;
