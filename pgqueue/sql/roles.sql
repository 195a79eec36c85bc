-- The roles that may be given to those who log in.

-- name: list_roles
-- Which of these roles there are, and who has been given each, directly or not.
SELECT asked.name, role.oid IS NOT NULL,
    ARRAY(
        SELECT member.rolname::text
        FROM pg_roles AS member
        WHERE role.oid IS NOT NULL
          AND NOT member.rolsuper
          AND member.oid <> role.oid
          AND pg_has_role(member.oid, role.oid, 'MEMBER')
        ORDER BY member.rolname
    )
FROM unnest(%(names)s::text[]) WITH ORDINALITY AS asked (name, nth)
LEFT JOIN pg_roles AS role ON role.rolname = asked.name
ORDER BY asked.nth;
