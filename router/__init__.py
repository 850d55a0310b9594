"""Where a request goes, and how it gets there.

app, settings   everything put together, by what config.yaml says

    a request comes     forwarding  one request on its way, whichever way it came in; upstream  connections to workers
    who may ask         access      tenants and their rates; admission  who waits, and who goes on first
    what is asked       apis        the bodies of each API; tokens  from prompts to token ids
    who could take it   fleet       the workers and how they do; holdings  what they hold beside what events tell
    who takes it        routing     from a prompt to a reserved worker; policies  what each costs; learning  their rates
                        disaggregation  prefill and decode on different workers

    several routers     sharing     their load is each other's
    Envoy in front      picker      it asks where to send what it carries
    to look at          live        the page and what it shows; telemetry  metrics, traces and logs; findings, explain
"""
