"""The SQL inbox: the functions delayer_send and delayer_cancel, and the table from which a daemon moves messages.

The functions run with the rights of the schema's owner (SECURITY DEFINER), so a role needs nothing but EXECUTE. Each
has search_path = pg_catalog, and names its schema where it means it. So no table, function or operator of a caller can
take the place of one of these, even for a role that may create in the schema itself. For that, all arguments of calls
within the schema have types: a literal without one would choose another function of the name. Never changed after a
release; it imports nothing of delayer.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# As for the partitions of message in 0001.
ROWS_THAT_CHURN = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000, vacuum_truncate = off"

# A message or a cancel, as an AMQP publisher would have sent it: the daemon builds the same delivery of it. headers are
# typed by JSON; properties has the other properties by name. id is the order in which a daemon reads. The sequence must
# not cache numbers, and a transaction must have its number before it draws an id (store/inbox.py). A byte of headers
# weighs as much as 16 of bodies: 64 kB of them may take 23 ms to decode. The weight is stored, because to find out the
# length of JSON costs more than to decode some of it, and a read looks at more rows than it returns.
TABLE = f"""
CREATE TABLE delayer_inbox (
    id          bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
    sent_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    exchange    text        NOT NULL,
    routing_key text        NOT NULL,
    headers     jsonb       NOT NULL,
    properties  jsonb       NOT NULL,
    body        bytea       NOT NULL,
    weight      bigint      GENERATED ALWAYS AS (octet_length(body) + 16 * octet_length(headers::text)::bigint) STORED,
    CONSTRAINT delayer_inbox_pkey PRIMARY KEY (id),
    CONSTRAINT delayer_inbox_names CHECK (octet_length(exchange) <= 255 AND octet_length(routing_key) <= 255)
) WITH ({ROWS_THAT_CHURN})
"""
STORAGE = "ALTER TABLE delayer_inbox ALTER COLUMN body SET STORAGE EXTERNAL"

# A NOTIFY makes the commits of all databases take turns, so only what cannot wait for the daemon's next poll, a second
# later, notifies.
WRITE = """
CREATE FUNCTION delayer_write(
    exchange text, routing_key text, headers jsonb, properties jsonb, body bytea, urgent boolean
) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    PERFORM pg_current_xact_id();
    INSERT INTO @schema.delayer_inbox (exchange, routing_key, headers, properties, body)
    VALUES (exchange, routing_key, headers, properties, body);
    IF urgent THEN
        PERFORM pg_notify('delayer_inbox', '');
    END IF;
END
$function$
"""

PARAMETERS = (
    "delay interval DEFAULT NULL",
    "due timestamptz DEFAULT NULL",
    "exchange text DEFAULT 'delayer.in'",
    "key text DEFAULT NULL",
    "headers jsonb DEFAULT '{}'",
    "message_id text DEFAULT NULL",
    "content_type text DEFAULT NULL",
    "key_mode text DEFAULT NULL",
    "key_ceiling interval DEFAULT NULL",
    "content_encoding text DEFAULT NULL",
    "correlation_id text DEFAULT NULL",
    "reply_to text DEFAULT NULL",
    "expiration interval DEFAULT NULL",
    "priority integer DEFAULT NULL",
    "type text DEFAULT NULL",
    "app_id text DEFAULT NULL",
)

# The checks name what an argument holds, and stop at the first mistake. What only a daemon knows (routes, max_delay) is
# refused later.
SEND = """
CREATE FUNCTION delayer_send(
    routing_key text,
    body bytea,
    @parameters
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    wrong text[];
    due_at timestamptz := coalesce(
        due, clock_timestamp() + CASE WHEN delay BETWEEN interval '0' AND interval '10000 years' THEN delay END);
    asked jsonb := '{}';
    id text := coalesce(message_id, gen_random_uuid()::text);
    shorts jsonb;
BEGIN
    wrong := CASE
        WHEN routing_key IS NULL THEN
            ARRAY['routing_key: expected text, found null', 'an empty text is a routing key too']
        WHEN body IS NULL THEN ARRAY['body: expected bytea, text or json, found null', 'an empty body is ''''']
        WHEN exchange IS NULL THEN
            ARRAY['exchange: expected text, found null', 'leave it out, or name the `from` of a route']
        WHEN headers IS NULL THEN ARRAY['headers: expected an object, found null', 'leave it out, or pass ''{}''']
        WHEN delay IS NOT NULL AND due IS NOT NULL THEN
            ARRAY['expected delay or due, found both', 'delay counts from this call; due is an instant']
        WHEN delay < interval '0' THEN
            ARRAY[format('delay: expected zero or more, found %s', delay), 'pass ''0 seconds'' to send at once']
        WHEN delay > interval '10000 years' THEN
            ARRAY[format('delay: expected at most 10000 years, found %s', delay), 'pass a shorter delay']
        WHEN NOT isfinite(due_at) OR due_at >= timestamptz '10000-01-01 00:00:00+00' THEN
            ARRAY[format('due: expected an instant before the year 10000, found %s', due_at), 'pass an earlier instant']
        WHEN octet_length(exchange) > 255 THEN
            ARRAY[format('exchange: expected at most 255 bytes, found %s', octet_length(exchange)),
                  'name the `from` of a route']
        WHEN octet_length(routing_key) > 255 THEN
            ARRAY[format('routing_key: expected at most 255 bytes, found %s', octet_length(routing_key)),
                  'AMQP limits routing keys to 255 bytes']
        WHEN octet_length(body) > 16777216 THEN
            ARRAY[format('body: expected at most 16777216 bytes, found %s', octet_length(body)),
                  'RabbitMQ takes no larger message by default: store the body elsewhere, and send a reference']
        WHEN octet_length(key) NOT BETWEEN 1 AND 255 THEN
            ARRAY[format('key: expected 1 to 255 bytes, found %s', octet_length(key)), 'leave key out to use none']
        WHEN starts_with(key, 'delayer.schedule/') THEN
            ARRAY[format('key: expected a key of your own, found %L', key),
                  'keys that begin with delayer.schedule/ belong to schedules']
        WHEN key_mode NOT IN ('replace', 'keep', 'debounce') THEN
            ARRAY[format('key_mode: expected replace, keep or debounce, found %L', key_mode),
                  'replace (the default) cancels the message that waits, keep throttles, debounce postpones']
        WHEN key_mode IS NOT NULL AND key IS NULL THEN
            ARRAY['key: expected a key, because key_mode is set, found null', 'pass key, or leave key_mode out']
        WHEN coalesce(key_mode, '') <> 'debounce' AND key_ceiling IS NOT NULL THEN
            ARRAY[format('key_mode: expected debounce, because key_ceiling is set, found %L', key_mode),
                  'pass key_mode => ''debounce'', or leave key_ceiling out']
        WHEN key_mode = 'debounce' AND key_ceiling IS NULL THEN
            ARRAY['key_ceiling: expected an interval, because key_mode is debounce, found null',
                  'pass the longest time that a message may be put off']
        WHEN key_ceiling < interval '0' THEN
            ARRAY[format('key_ceiling: expected zero or more, found %s', key_ceiling), 'pass a longer interval']
        WHEN key_ceiling > interval '10000 years' THEN
            ARRAY[format('key_ceiling: expected at most 10000 years, found %s', key_ceiling), 'pass a shorter interval']
        WHEN expiration < interval '0' THEN
            ARRAY[format('expiration: expected zero or more, found %s', expiration), 'leave it out to use none']
        WHEN extract(epoch FROM expiration) > 315360000 THEN
            ARRAY[format('expiration: expected at most 3650 days, found %s', expiration), 'leave it out to use none']
        WHEN reply_to = 'amq.rabbitmq.reply-to' THEN
            ARRAY[format('reply_to: expected a queue, found the direct reply %L', reply_to),
                  'only a consumer on the channel of the publish has that address']
        WHEN priority NOT BETWEEN 0 AND 255 THEN
            ARRAY[format('priority: expected 0 to 255, found %s', priority), 'leave it out to use none']
        WHEN jsonb_typeof(headers) <> 'object' THEN
            ARRAY[format('headers: expected an object, found %s', jsonb_typeof(headers)), 'pass ''{"name": "value"}''']
        WHEN octet_length(headers::text) > 65536 THEN
            ARRAY[format('headers: expected at most 65536 bytes, found %s', octet_length(headers::text)),
                  'put large values into the body']
        WHEN jsonb_path_exists(headers, 'strict $.**{65 to last} ? (@.type() == "array" || @.type() == "object")') THEN
            ARRAY['headers: expected at most 64 levels in a value, found more', 'put nested values into the body']
        WHEN due_at IS NOT NULL
             AND headers ?| ARRAY['x-delay', 'x-deliver-at', 'x-opt-delivery-delay', 'x-opt-delivery-time'] THEN
            ARRAY['headers: expected no delay next to delay or due, found one', 'state the delay once']
        WHEN key IS NOT NULL AND headers ?| ARRAY['x-delay-key', 'x-delay-key-mode', 'x-delay-key-ceiling'] THEN
            ARRAY['headers: expected no x-delay-key… next to key, found one', 'state the key once']
        WHEN headers ? 'x-death' THEN
            ARRAY['headers: expected no x-death, found one', 'only a broker writes it: leave it out']
        WHEN jsonb_typeof(headers -> 'CC') <> 'array' OR jsonb_typeof(headers -> 'BCC') <> 'array' THEN
            ARRAY['headers: expected arrays of routing keys in CC and BCC, found something else',
                  'pass ''{"CC": ["key"]}''']
    END;
    IF wrong IS NULL AND headers <> '{}' THEN
        SELECT ARRAY[format('headers: expected names of 1 to 255 bytes, and numbers within ±1e308, found %L',
                            left(coalesce(name, value::text), 60)),
                     'shorten the name, or pass the number as a string']
        INTO wrong
        FROM jsonb_path_query(headers, 'strict $.**') AS part (value)
        LEFT JOIN LATERAL jsonb_object_keys(CASE jsonb_typeof(value) WHEN 'object' THEN value END) AS name ON true
        WHERE octet_length(name) NOT BETWEEN 1 AND 255
              OR CASE jsonb_typeof(value) WHEN 'number' THEN abs(value::numeric) > 1e308 ELSE false END
        LIMIT 1;
    END IF;
    shorts := jsonb_strip_nulls(jsonb_build_object(
        'message_id', id, 'content_type', content_type, 'content_encoding', content_encoding, 'app_id', app_id,
        'correlation_id', correlation_id, 'reply_to', reply_to, 'type', type, 'priority', priority,
        'expiration', CASE WHEN wrong IS NULL THEN ceil(extract(epoch FROM expiration) * 1000)::bigint::text END));
    IF wrong IS NULL AND greatest(octet_length(id), octet_length(content_type), octet_length(content_encoding),
                                  octet_length(app_id), octet_length(correlation_id), octet_length(reply_to),
                                  octet_length(type)) > 255 THEN
        SELECT ARRAY[format('%s: expected at most 255 bytes, found %s', name, octet_length(value)),
                     'AMQP limits this property to 255 bytes']
        INTO wrong
        FROM jsonb_each_text(shorts) AS property (name, value) WHERE octet_length(value) > 255 LIMIT 1;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = CASE WHEN wrong[1] LIKE '%found null' THEN '22004' ELSE '22023' END,
                              MESSAGE = 'delayer_send: ' || wrong[1], HINT = wrong[2];
    END IF;
    IF due_at IS NOT NULL THEN
        -- Not before 1973: in milliseconds, an earlier instant looks like seconds, and is refused.
        asked := jsonb_build_object(
            'x-deliver-at', greatest(ceil(extract(epoch FROM due_at)::numeric * 1000), 100000000000)::bigint);
    END IF;
    IF key IS NOT NULL THEN
        asked := asked || jsonb_strip_nulls(jsonb_build_object(
            'x-delay-key', key, 'x-delay-key-mode', key_mode,
            'x-delay-key-ceiling', ceil(extract(epoch FROM key_ceiling) * 1000)::bigint));
    END IF;
    PERFORM @schema.delayer_write(exchange, routing_key, headers || asked, shorts, body,
                          due_at IS NULL OR due_at < clock_timestamp() + interval '5 seconds');
    RETURN id;
END
$function$
"""


def overload(type_: str, as_bytes: str, content_type: str) -> str:
    """An overload for bodies of ``type_``."""
    names = (one.split()[0] for one in PARAMETERS)
    passed = ", ".join(
        f"coalesce(content_type, '{content_type}')" if name == "content_type" else name for name in names
    )
    return f"""
CREATE FUNCTION delayer_send(
    routing_key text,
    body {type_},
    @parameters
) RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
    SELECT @schema.delayer_send(routing_key, {as_bytes}, {passed})
$function$
"""


CANCEL = """
CREATE FUNCTION delayer_cancel(key text, exchange text DEFAULT 'delayer.in') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    IF key IS NULL OR exchange IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'delayer_cancel: key, exchange: expected text, found null',
                              HINT = 'pass the key that the message was sent with';
    ELSIF octet_length(key) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023',
            MESSAGE = format('delayer_cancel: key: expected 1 to 255 bytes, found %s', octet_length(key)),
            HINT = 'pass the key that the message was sent with';
    ELSIF octet_length(exchange) > 255 THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023',
            MESSAGE = format('delayer_cancel: exchange: expected at most 255 bytes, found %s', octet_length(exchange)),
            HINT = 'pass the exchange that the message was sent to';
    ELSIF starts_with(key, 'delayer.schedule/') THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023',
            MESSAGE = format('delayer_cancel: key: expected a key of your own, found %L', key),
            HINT = 'keys that begin with delayer.schedule/ belong to schedules: see `delayer schedule`';
    END IF;
    PERFORM @schema.delayer_write(
        exchange, text '', jsonb_build_object('x-delay-cancel', key), jsonb '{}', bytea '', true);
END
$function$
"""

# Functions are executable by everybody unless this is taken away.
REVOKE = """
DO $block$
DECLARE
    one regprocedure;
BEGIN
    FOR one IN SELECT oid::regprocedure FROM pg_proc
               WHERE pronamespace = quote_ident(current_schema())::regnamespace
                     AND proname IN ('delayer_send', 'delayer_cancel', 'delayer_write')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one);
    END LOOP;
END
$block$
"""


def upgrade() -> None:
    connection = op.get_bind()
    schema = connection.exec_driver_sql("SELECT quote_ident(current_schema())").scalar_one()
    parameters = ",\n    ".join(PARAMETERS)
    functions = (
        WRITE,
        SEND,
        overload("text", "convert_to(body, 'UTF8')", "text/plain; charset=utf-8"),
        *(overload(one, "convert_to(body::text, 'UTF8')", "application/json") for one in ("json", "jsonb")),
        CANCEL,
    )
    for statement in (TABLE, STORAGE):
        connection.exec_driver_sql(statement)
    for function in functions:
        connection.exec_driver_sql(function.replace("@schema", schema).replace("@parameters", parameters))
    connection.exec_driver_sql(REVOKE)
