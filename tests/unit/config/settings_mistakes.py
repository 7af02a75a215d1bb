"""Files with mistakes in them, and what is said about each, to the letter."""

from __future__ import annotations

import json

from delayer.core.delay_headers import DELAY_FORMS

DURATION = 'a duration such as "250ms", "10s", "5m", "12h" or "30d"'
KNOWN = "a known key"
OF_CELERY = 'none, or beside cascade = "celery" a short one of letters, digits and -_.:'
UNKNOWN = "an unknown one"
LISTEN = '"host:port" (IPv6 as "[::1]:port"), or "" for none'
BLANKS = ", without blanks and control characters; in a password they are written %20 and so on"
BROKER_URL = "a URL like amqp://user:password@host:5672/vhost, or amqps:// for TLS"
STORE_URL = "a URL like postgresql://user:password@host:5432/database"
FORMS = f"a list of {', '.join(DELAY_FORMS)} and json:/pointer, each at most once"
RETRY = '[[route]]\nfrom = "a"\nretry = '
ROUTES = "one or more routes: [[route]] tables in the file, a JSON list of objects elsewhere"
DUE = "the name of a queue of at most 199 bytes, none of its words * or #"
UMLAUT = r"\u00fc"
UNBINDABLE = {"q" * 200: f'"{"q" * 78}…', "ü" * 100: f'"{UMLAUT * 13}…', "delays.*": '"delays.*"', "#": '"#"'}

# text of the file, then (key, expected, found, hint) of each problem in it
FILES: list[tuple[str, list[tuple[str, str, str, str]]]] = [
    ('mode = "stor"', [("mode", '"native" or "store"', '"stor"', "")]),
    ("mode = 1", [("mode", '"native" or "store"', "1", "")]),
    ('mod = "store"', [("mod", KNOWN, UNKNOWN, "did you mean mode?")]),
    ("prefetch = 5", [("prefetch", KNOWN, UNKNOWN, "did you mean intake.prefetch?")]),
    ('broker = "amqp://u:pw@h"', [("broker", "a table", '"amqp://u:***@h"', "")]),
    ('[brokr]\nurl = "x"', [("brokr", KNOWN, UNKNOWN, "did you mean broker?")]),
    ('[broker]\nurl = "http://u:pw@h"', [("broker.url", BROKER_URL, '"http://u:***@h"', "")]),
    ('[broker]\nurl = "secret"', [("broker.url", BROKER_URL, "a text that is no URL (not shown)", "")]),
    ('[broker]\nurl = ""', [("broker.url", BROKER_URL, '""', "")]),
    ("[broker]\nurl = 5672", [("broker.url", BROKER_URL, "5672", "")]),
    ('[broker]\nurl = "amqp://h/a b"', [("broker.url", BROKER_URL + BLANKS, '"amqp://h/a b"', "")]),
    (
        '[broker]\nurl = "amqp://h/a/b"',
        [
            (
                "broker.url",
                'a URL with one virtual host at its end; a "/" in its name, or in the password, is written %2F',
                '"amqp://h/a/b"',
                "",
            )
        ],
    ),
    (
        '[broker]\nurl = "amqp://u:p/w@h"',
        [
            (
                "broker.url",
                f"{BROKER_URL}; characters like / @ : # in a password are written %2F %40 %3A %23",
                '"amqp://u:***@h"',
                "",
            )
        ],
    ),
    ('[broker]\npasswrd = "hunter2"', [("broker.passwrd", KNOWN, UNKNOWN, "")]),
    (
        '[broker]\nurl = "amqp://h"\nurl_file = "/dev/null"',
        [("broker.url_file", "either url or url_file", "both", "")],
    ),
    (
        '[broker]\nurl_file = "/nowhere/x"',
        [("broker.url_file", "a file that can be read", '"/nowhere/x"', "No such file or directory")],
    ),
    (
        '[broker]\nurl_file = "${CREDENTIALS_DIRECTORY}/x"',
        [
            (
                "broker.url_file",
                "CREDENTIALS_DIRECTORY to be set",
                '"${CREDENTIALS_DIRECTORY}/x"',
                "LoadCredential= in the unit sets it for the daemon; in a shell: sudo "
                "CREDENTIALS_DIRECTORY=/etc/delayer delayer check",
            )
        ],
    ),
    (
        '[broker]\nca_file = "/nowhere/ca"',
        [("broker.ca_file", "a file that can be read", '"/nowhere/ca"', "No such file or directory")],
    ),
    (
        '[broker]\nkey_file = "/dev/null"',
        [("broker.key_file", "cert_file beside key_file", '"/dev/null"', "")],
    ),
    ("[broker]\nverify = 1", [("broker.verify", "true or false", "1", "")]),
    ('[broker]\nverify = "yes"', [("broker.verify", "true or false", '"yes"', "")]),
    (
        '[store]\nrestore_ahead = "4m"',
        [("store.restore_ahead", 'a duration of at least "5m": what is restored later would be late', '"4m"', "")],
    ),
    (
        '[broker]\nheartbeat = "500ms"',
        [("broker.heartbeat", 'whole seconds from "0s" (off) to "65535s"', '"500ms"', "")],
    ),
    (
        '[broker]\nmanagement_url = "amqp://u:pw@h"',
        [("broker.management_url", 'a URL like http://user:password@host:15672, or ""', '"amqp://u:***@h"', "")],
    ),
    (
        '[intake]\nqueue = ""',
        [
            (
                "intake.queue",
                'the name of a queue: not empty, and not beginning with "amq.", which the broker keeps for itself',
                '""',
                "",
            )
        ],
    ),
    ('[intake]\nqueue = ["a"]', [("intake.queue", "the name of a queue", "a list of 1", "")]),
    (
        '[intake]\nqueue = "a\\nb"',
        [("intake.queue", "the name of a queue without control characters", '"a\\nb"', "")],
    ),
    (
        f'[intake]\nqueue = "{"é" * 128}"',
        [("intake.queue", "the name of a queue of at most 255 bytes", json.dumps("é" * 128)[:79] + "…", "")],
    ),
    ('[intake]\ngive_back_after = "999ms"', [("intake.give_back_after", 'a duration of at least "1s"', '"999ms"', "")]),
    ("[intake]\nprefetch = 0", [("intake.prefetch", "a whole number of at least 1", "0", "")]),
    ("[intake]\nprefetch = 65536", [("intake.prefetch", "a whole number of at most 65535", "65536", "")]),
    ("[intake]\nprefetch = true", [("intake.prefetch", "a whole number", "true", "")]),
    ('[intake]\nprefetch = "5"', [("intake.prefetch", "a whole number", '"5"', "")]),
    ("[intake]\nprefetch = 5.0", [("intake.prefetch", "a whole number", "5.0", "")]),
    (
        "[intake]\nmax_delay = 10",
        [("intake.max_delay", f'{DURATION} (a bare number has no unit: write "10s" or "10ms")', "10", "")],
    ),
    ('[intake]\nmax_delay = "10 years"', [("intake.max_delay", DURATION, '"10 years"', "")]),
    ("[intake]\nmax_delay = 2026-01-01", [("intake.max_delay", DURATION, "2026-01-01", "")]),
    ('[intake]\nmax_delay = "40000d"', [("intake.max_delay", "a duration of at most 36500d", '"40000d"', "")]),
    ("route = []", [("route", ROUTES, "a list of 0", "")]),
    ('[route]\nfrom = "a"', [("route", ROUTES, "a table", "")]),
    ("route = [1]", [("route[0]", "a table", "1", "")]),
    ('[[route]]\nto = "a"', [("route[0].from", "a value", "nothing", "")]),
    (
        '[[route]]\nfrom = "a"\nlate_actoin = "hold"',
        [("route[0].late_actoin", KNOWN, UNKNOWN, "did you mean late_action?")],
    ),
    (
        '[[route]]\nfrom = "a"\n[[route]]\nfrom = "b"\nlate_action = "drop"',
        [("route[1].late_action", '"deliver" or "hold"', '"drop"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\nto = "a"',
        [
            (
                "route[0].to",
                "an exchange other than the route's own from: due messages would come in again for ever",
                '"a"',
                "",
            )
        ],
    ),
    (
        '[[route]]\nfrom = "a"\nrouting_key = "delays"',
        [("route[0].routing_key", "a queue other than the intake queue", '"delays"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\n[[route]]\nfrom = "b"\n[[route]]\nfrom = "a"',
        [("route[2].from", "an exchange that no other route has (route[0])", '"a"', "")],
    ),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["x-dely"]',
        [("route[0].delay_from", f'{FORMS} ("x-dely" is none of them)', "a list of 1", "")],
    ),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["json:nextattempt.time"]',
        [("route[0].delay_from", f'{FORMS} ("json:nextattempt.time" is none of them)', "a list of 1", "")],
    ),
    (f"{RETRY}{{}}", [("route[0].retry.exhausted", "a value", "nothing", "")]),
    (
        f'{RETRY}{{exhausted = "parked", factor = 0.5, jitter = 2, attempts = 0, first = 5, last = "1h"}}',
        [
            ("route[0].retry.first", f'{DURATION} (a bare number has no unit: write "5s" or "5ms")', "5", ""),
            ("route[0].retry.factor", "a number of at least 1", "0.5", ""),
            ("route[0].retry.jitter", "a number of at most 1", "2", ""),
            ("route[0].retry.attempts", "a whole number of at least 1", "0", ""),
            (
                "route[0].retry.last",
                KNOWN,
                UNKNOWN,
                "known here: first, factor, max, jitter, attempts, exhausted",
            ),
        ],
    ),
    (
        f'{RETRY}{{exhausted = "parked", first = "2h", max = "1h"}}',
        [("route[0].retry.max", "a duration that is not less than first", '"1h"', "")],
    ),
    (
        f'{RETRY}{{exhausted = "parked"}}\nto = "b"',
        [
            (
                "route[0].retry",
                "no to, routing_key, default_delay or allow_exchanges beside it: dead letters go back to their queue",
                "a table",
                "",
            )
        ],
    ),
    (
        f'{RETRY}{{exhausted = "delays.refused"}}',
        [("route[0].retry.exhausted", "another queue than refused.queue", '"delays.refused"', "")],
    ),
    (
        '[[takeover]]\ncascade = "delayer"\nlevels_from = 28',
        [
            ("takeover[0].cascade", '"nservicebus-v2", "nservicebus-v1" or "celery"', '"delayer"', ""),
            ("takeover[0].levels_from", "a whole number of at most 27", "28", ""),
        ],
    ),
    (
        'takeover = "celery"',
        [("takeover", "a list of tables: [[…]] in the file, a JSON list of objects elsewhere", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "celery"\n[[takeover]]\ncascade = "celery"',
        [("takeover[1].cascade", "a cascade that no other takeover has", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "celery"\nprefix = "shop"\n[[takeover]]\ncascade = "celery"\nprefix = "shop"',
        [("takeover[1].cascade", "a cascade that no other takeover has", '"celery"', "")],
    ),
    (
        '[[takeover]]\ncascade = "nservicebus-v2"\nprefix = "shop"\n[[takeover]]\ncascade = "celery"\nprefix = "a b"',
        [(f"takeover[{index}].prefix", OF_CELERY, found, "") for index, found in enumerate(('"shop"', '"a b"'))],
    ),
    (
        'mode = "native"\n[[takeover]]\ncascade = "celery"',
        [("takeover", "a store for what is taken over: store.url, where the mode is native", "none", "")],
    ),
    (
        'mode = "native"\nstore = 1\n[[takeover]]\ncascade = "celery"',
        [
            ("store", "a table", "1", ""),
            ("takeover", "a store for what is taken over: store.url, where the mode is native", "none", ""),
        ],
    ),
    (
        '[[takeover]]\ncascade = "celery"\n[[route]]\nfrom = "celery_delayed_27"\n[intake]\nqueue = "celery_delayed_3"',
        [
            (
                "intake.queue",
                "a name that is not one of cascade celery's, which is its owner's",
                '"celery_delayed_3"',
                "",
            ),
            (
                "route[0].from",
                "a name that is not one of cascade celery's, which is its owner's",
                '"celery_delayed_27"',
                "",
            ),
        ],
    ),
    (
        '[[destination]]\nqueue = "amq.mine"\ntype = "headers"\nkeys = "outbox"',
        [
            ("destination[0].type", '"topic", "direct" or "fanout"', '"headers"', ""),
            (
                "destination[0].queue",
                'the name of a queue: not empty, and not beginning with "amq.", which the broker keeps for itself',
                '"amq.mine"',
                "",
            ),
            ("destination[0].keys", "a list of routing keys", '"outbox"', ""),
        ],
    ),
    ('[[route]]\nfrom = "a"\ndelay_from = "x-delay"', [("route[0].delay_from", FORMS, '"x-delay"', "")]),
    (
        '[[route]]\nfrom = "a"\ndelay_from = ["x-delay", "x-delay"]',
        [("route[0].delay_from", f'{FORMS} ("x-delay" is there twice)', "a list of 2", "")],
    ),
    (
        '[[route]]\nfrom = "a"\nallow_exchanges = "b"',
        [("route[0].allow_exchanges", "a list of patterns of exchange names", '"b"', "")],
    ),
    (
        '[intake]\nmax_delay = "1h"\n[[route]]\nfrom = "a"\ndefault_delay = "61m"',
        [("route[0].default_delay", "at most intake.max_delay, 1h", '"61m"', "")],
    ),
    (
        '[native]\ncascade = "celery"',
        [("native.cascade", KNOWN, UNKNOWN, "known here: prefix, due_queue")],
    ),
    (
        f'[native]\nprefix = "{"p" * 114}"',
        [("native.prefix", "a prefix of names of at most 113 bytes", '"' + "p" * 78 + "…", "")],
    ),
    (
        '[native]\nprefix = "amq."',
        [
            (
                "native.prefix",
                'a prefix that does not begin with "amq.", which the broker keeps for itself',
                '"amq."',
                "",
            )
        ],
    ),
    *((f'native.due_queue = "{name}"', [("native.due_queue", DUE, found, "")]) for name, found in UNBINDABLE.items()),
    ('[native]\ndue_queue = "delays"', [("native.due_queue", "another queue than intake.queue", '"delays"', "")]),
    (
        '[[route]]\nfrom = "a"\nto = "b"\n[[route]]\nfrom = "b"\nto = "a"',
        [
            ("route[0].to", 'an exchange that does not lead back here ("a" to "b" to "a")', '"b"', ""),
            ("route[1].to", 'an exchange that does not lead back here ("b" to "a" to "b")', '"a"', ""),
        ],
    ),
    (
        '[intake]\nqueue = "delayer.delay-level-03"',
        [("intake.queue", "a name that is not one of the cascade's", '"delayer.delay-level-03"', "")],
    ),
    (
        '[[route]]\nfrom = "delayer.delay-strays"\nto = "delayer.delay-delivery"',
        [
            ("route[0].from", "a name that is not one of the cascade's", '"delayer.delay-strays"', ""),
            ("route[0].to", "a name that is not one of the cascade's", '"delayer.delay-delivery"', ""),
        ],
    ),
    (
        '[[route]]\nfrom = "in"\nto = ""\nrouting_key = "delays.due"',
        [("route[0].routing_key", "a name that is not one of the cascade's", '"delays.due"', "")],
    ),
    (
        '[refused]\nqueue = "in"\n[[route]]\nfrom = "in"\nto = "out"',
        [("route[0].from", "another name than refused.queue, whose exchange takes it", '"in"', "")],
    ),
    ('[intake]\nqueue = "delays.due"', [("native.due_queue", "another queue than intake.queue", '"delays.due"', "")]),
    (
        '[native]\ndue_queue = "x"\n[refused]\nqueue = "x"',
        [("refused.queue", "another queue than native.due_queue", '"x"', "")],
    ),
    ('[store]\nurl = "mysql://h"', [("store.url", STORE_URL, '"mysql://h"', "")]),
    ("[store]\nlanes = 0", [("store.lanes", "a whole number of at least 1", "0", "")]),
    ('[http]\nlisten = "9419"', [("http.listen", LISTEN, '"9419"', "")]),
    ('[http]\nlisten = "::1:9419"', [("http.listen", LISTEN, '"::1:9419"', "")]),
    ('[http]\nlisten = "h:65536"', [("http.listen", f"{LISTEN}, the port at most 65535", '"h:65536"', "")]),
    ('[log]\nlevel = "loud"', [("log.level", '"debug", "info", "warning" or "error"', '"loud"', "")]),
    ('[log]\nformat = "xml"', [("log.format", '"json" or "console"', '"xml"', "")]),
]
