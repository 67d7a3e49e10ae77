# Build:  docker build -t dnsproxy .
# Run:    docker run --rm --network host --cap-drop ALL --cap-add NET_ADMIN --cap-add NET_BIND_SERVICE \
#             --read-only --tmpfs /run/dnsproxy:mode=1777 -v dnsproxy-state:/var/lib/dnsproxy \
#             -v /etc/dnsproxy:/etc/dnsproxy:ro dnsproxy
# Ask:    docker exec CONTAINER dnsproxy status
#
# A container's user other than root gets no capabilities from --cap-add; the interpreter below is marked with
# those two instead (file capabilities), so that the process can be an ordinary user. Consequences: without
# --cap-add NET_ADMIN it does not start at all ("operation not permitted"), and
# `--security-opt no-new-privileges` takes the marks away.

FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY dnsproxy dnsproxy
# --copies: an interpreter of our own, which alone is marked.
RUN python -m venv --copies /opt/dnsproxy \
    && /opt/dnsproxy/bin/pip install --no-cache-dir --disable-pip-version-check '.[fast]'

FROM python:3.13-slim-bookworm
RUN useradd --system --no-create-home --shell /usr/sbin/nologin dnsproxy
COPY --from=build /opt/dnsproxy /opt/dnsproxy
COPY config/dnsproxy.yaml /etc/dnsproxy/dnsproxy.yaml
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libcap2-bin \
    && find /opt/dnsproxy/bin -name 'python*' -type f \
        -exec setcap cap_net_admin,cap_net_bind_service+ep '{}' ';' \
    && apt-get purge --yes --auto-remove libcap2-bin \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /etc/dnsproxy/policies.d \
    && install -d -o dnsproxy -g dnsproxy -m 0700 /var/lib/dnsproxy \
    && install -d -o dnsproxy -g dnsproxy -m 0755 /run/dnsproxy
VOLUME /var/lib/dnsproxy
ENV PATH=/opt/dnsproxy/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER dnsproxy
STOPSIGNAL SIGTERM
# Any answer at all means that it serves: the root name needs no permission to be denied.
HEALTHCHECK --interval=30s --timeout=3s --start-period=5s \
    CMD ["python", "-c", "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.connect(('127.0.0.1', 53)); s.send(bytes.fromhex('2a2a01000001000000000000' '0000010001')); assert s.recv(512)[:2] == b'**'"]
ENTRYPOINT ["dnsproxy"]
CMD ["run", "--config", "/etc/dnsproxy/dnsproxy.yaml"]
