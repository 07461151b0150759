package org.missioncontrol;

import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;

/** A connection to the worker: HTTP/1.1 over its local socket, one request after another. */
final class Connection implements AutoCloseable {
    private static final int BUFFER = 1 << 18;

    private final SocketChannel channel;
    /** Bytes that have arrived and were not read yet. */
    private final ByteBuffer arrived = ByteBuffer.allocateDirect(BUFFER).flip();
    /** Bytes to send. For an array, Java would keep a copy of the same size outside its heap, for each thread. */
    private final ByteBuffer leaves = ByteBuffer.allocateDirect(BUFFER);

    Connection(String path) throws IOException {
        channel = SocketChannel.open(StandardProtocolFamily.UNIX);
        channel.connect(UnixDomainSocketAddress.of(path));
    }

    /** An answer; its body has to be read to its end before the next request. */
    record Answer(int status, Map<String, String> headers, InputStream body) {
        /** Whether another request may follow. */
        boolean stays() {
            return !"close".equalsIgnoreCase(headers.get("connection"));
        }

        boolean isChunked() {
            return "chunked".equals(headers.get("transfer-encoding"));
        }
    }

    Answer request(String method, String path, String credential, ByteBuffer... body) throws IOException {
        long length = 0;
        for (ByteBuffer part : body) {
            length += part.remaining();
        }
        String head = method + " " + path + " HTTP/1.1\r\nHost: worker\r\nAuthorization: Bearer " + credential
                + "\r\nContent-Length: " + length + "\r\n\r\n";
        send(ByteBuffer.wrap(head.getBytes(StandardCharsets.US_ASCII)));
        for (ByteBuffer part : body) {
            send(part);
        }
        flush();
        return answer();
    }

    private void send(ByteBuffer part) throws IOException {
        ByteBuffer left = part.duplicate();
        while (left.hasRemaining()) {
            if (!leaves.hasRemaining()) {
                flush();
            }
            int length = Math.min(left.remaining(), leaves.remaining());
            leaves.put(left.slice(left.position(), length));
            left.position(left.position() + length);
        }
    }

    private void flush() throws IOException {
        leaves.flip();
        while (leaves.hasRemaining()) {
            channel.write(leaves);
        }
        leaves.clear();
    }

    private Answer answer() throws IOException {
        String[] first = line().split(" ", 3);
        if (first.length < 2 || !first[0].startsWith("HTTP/1.")) {
            throw new IOException("the worker's answer is not HTTP: " + String.join(" ", first));
        }
        Map<String, String> headers = new HashMap<>();
        for (String line = line(); !line.isEmpty(); line = line()) {
            int colon = line.indexOf(':');
            headers.put(line.substring(0, Math.max(colon, 0)).toLowerCase(Locale.ROOT), line.substring(colon + 1).strip());
        }
        long length = Long.parseLong(headers.getOrDefault("content-length", "0"));
        boolean chunked = "chunked".equals(headers.get("transfer-encoding"));
        return new Answer(Integer.parseInt(first[1]), headers, new Body(chunked, chunked ? 0 : length));
    }

    private String line() throws IOException {
        StringBuilder line = new StringBuilder();
        while (true) {
            if (!arrived.hasRemaining()) {
                fill();
            }
            char next = (char) (arrived.get() & 0xff);
            if (next == '\n') {
                return line.toString();
            }
            if (next != '\r') {
                line.append(next);
            }
            if (line.length() > 1 << 16) {
                throw new IOException("a line of the worker's answer is too long");
            }
        }
    }

    private void fill() throws IOException {
        arrived.clear();
        int got = channel.read(arrived);
        arrived.flip();
        if (got <= 0) {
            throw new EOFException("the worker has closed the connection");
        }
    }

    /** Takes some of what has arrived, or arrives now. */
    private int take(byte[] into, int start, int length) throws IOException {
        if (!arrived.hasRemaining()) {
            fill();
        }
        int got = Math.min(length, arrived.remaining());
        arrived.get(into, start, got);
        return got;
    }

    boolean isOpen() {
        return channel.isOpen();
    }

    @Override
    public void close() throws IOException {
        channel.close();
    }

    /** The body of an answer. A premature end is an error. */
    private final class Body extends InputStream {
        private final boolean chunked;
        private long left;
        private boolean ended;

        Body(boolean chunked, long length) {
            this.chunked = chunked;
            left = length;
            ended = !chunked && length == 0;
        }

        @Override
        public int read() throws IOException {
            byte[] one = new byte[1];
            return read(one, 0, 1) < 0 ? -1 : one[0] & 0xff;
        }

        @Override
        public int read(byte[] into, int start, int length) throws IOException {
            if (length == 0) {
                return 0;
            }
            if (!ended && chunked && left == 0) {
                left = Long.parseLong(line().strip(), 16);
                if (left == 0) {
                    line();
                    ended = true;
                }
            }
            if (ended) {
                return -1;
            }
            int got = take(into, start, (int) Math.min(length, left));
            left -= got;
            if (left == 0) {
                if (chunked) {
                    line();
                } else {
                    ended = true;
                }
            }
            return got;
        }
    }
}
