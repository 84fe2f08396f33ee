// gRPC of Go against Gangway: `client FOLDER ADDRESS [ROOT CERTIFICATE KEY]`. See __main__.py about FOLDER.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"io/ioutil"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	service    = "/inference.GRPCInferenceService/"
	concurrent = 200
	rounds     = 3
	maxBytes   = 64 << 20
	wait       = 60 * time.Second
)

// Messages stay serialised: what is tested is the way that they go.
type asIs struct{}

func (asIs) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (asIs) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte{}, data...)
	return nil
}
func (asIs) Name() string { return "proto" }

var input = bufio.NewReader(os.Stdin)

func file(name string) []byte {
	data, err := ioutil.ReadFile(filepath.Join(os.Args[1], name))
	if err != nil {
		panic(err)
	}
	return data
}

func say(content map[string]string) {
	line, _ := json.Marshal(content)
	fmt.Println(string(line))
}

func ask(what string) {
	say(map[string]string{"ask": what})
	input.ReadString('\n')
}

func infer(conn *grpc.ClientConn, ctx context.Context, request []byte, options ...grpc.CallOption) ([]byte, error) {
	var answer []byte
	err := conn.Invoke(ctx, service+"ModelInfer", &request, &answer, options...)
	return answer, err
}

func answered(conn *grpc.ClientConn, name string, options ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	return answeredIn(ctx, conn, name, options...)
}

func answeredIn(ctx context.Context, conn *grpc.ClientConn, name string, options ...grpc.CallOption) error {
	answer, err := infer(conn, ctx, file(name+".request"), options...)
	if err == nil && !bytes.Equal(answer, file(name+".answer")) {
		err = fmt.Errorf("another answer of %d bytes", len(answer))
	}
	return err
}

func refused(err error, code codes.Code, text string) error {
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), text) {
		return fmt.Errorf("not %v %q, but %v", code, text, err)
	}
	return nil
}

func stream(conn *grpc.ClientConn, ctx context.Context) (grpc.ClientStream, error) {
	both := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	return conn.NewStream(ctx, both, service+"ModelStreamInfer")
}

func streamed(conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	call, err := stream(conn, ctx)
	request, wanted := file("small.request"), file("stream.answer")
	for round := 0; err == nil && round < rounds; round++ {
		var answer []byte
		if err = call.SendMsg(&request); err == nil {
			err = call.RecvMsg(&answer)
		}
		if err == nil && !bytes.Equal(answer, wanted) {
			err = fmt.Errorf("another answer of %d bytes", len(answer))
		}
	}
	if err != nil {
		return err
	}
	var more []byte
	call.CloseSend()
	if err = call.RecvMsg(&more); err != io.EOF {
		return fmt.Errorf("no end, but %v", err)
	}
	return nil
}

func givenUp(conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	_, err := infer(conn, ctx, file("slow.request"))
	if err = refused(err, codes.Canceled, ""); err != nil {
		return err
	}
	ctx, cancel = context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	call, err := stream(conn, ctx)
	if err == nil {
		request := file("slow.request")
		call.SendMsg(&request)
		var answer []byte
		err = refused(call.RecvMsg(&answer), codes.Canceled, "")
	}
	if err != nil {
		return err
	}
	return answered(conn, "small")
}

func late(conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := infer(conn, ctx, file("slow.request"))
	return refused(err, codes.DeadlineExceeded, "")
}

func withMetadata(conn *grpc.ClientConn) error {
	pairs := metadata.Pairs("x-text", "some text", "x-raw-bin", "\x00\xff\n\x80", "x-many", "1", "x-many", "2")
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(context.Background(), pairs), wait)
	defer cancel()
	return answeredIn(ctx, conn, "small")
}

func wrong(conn *grpc.ClientConn, name string, code codes.Code) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := infer(conn, ctx, file(name+".request"))
	return refused(err, code, string(file(name+".text")))
}

func many(conn *grpc.ClientConn) error {
	var group sync.WaitGroup
	problems := make(chan error, concurrent)
	for number := 0; number < concurrent; number++ {
		group.Add(1)
		go func() {
			defer group.Done()
			problems <- answered(conn, "small")
		}()
	}
	group.Wait()
	close(problems)
	for err := range problems {
		if err != nil {
			return err
		}
	}
	return nil
}

func killed(conn *grpc.ClientConn) error {
	ask("kill")
	end := time.Now().Add(wait)
	for {
		err := answered(conn, "small")
		if err == nil || time.Now().After(end) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func drained(conn *grpc.ClientConn) error {
	result := make(chan error, 1)
	go func() { result <- answered(conn, "slow") }()
	time.Sleep(500 * time.Millisecond)
	ask("drain")
	return <-result
}

func main() {
	security := grpc.WithInsecure()
	if len(os.Args) > 3 {
		roots := x509.NewCertPool()
		root, _ := ioutil.ReadFile(os.Args[3])
		roots.AppendCertsFromPEM(root)
		own, err := tls.LoadX509KeyPair(os.Args[4], os.Args[5])
		if err != nil {
			panic(err)
		}
		config := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}, ServerName: "localhost"}
		security = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	sizes := []grpc.CallOption{grpc.ForceCodec(asIs{}), grpc.MaxCallRecvMsgSize(maxBytes), grpc.MaxCallSendMsgSize(maxBytes)}
	alive := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}
	conn, err := grpc.Dial(os.Args[2], security, grpc.WithDefaultCallOptions(sizes...), grpc.WithKeepaliveParams(alive))
	if err != nil {
		panic(err)
	}
	checks := []struct {
		name  string
		check func(*grpc.ClientConn) error
	}{
		{"small", func(conn *grpc.ClientConn) error { return answered(conn, "small") }},
		{"16 MB", func(conn *grpc.ClientConn) error { return answered(conn, "large") }},
		{"gzip", func(conn *grpc.ClientConn) error { return answered(conn, "large", grpc.UseCompressor(gzip.Name)) }},
		{"stream", streamed},
		{"deadline", late},
		{"cancellation", givenUp},
		{"metadata", withMetadata},
		{"error", func(conn *grpc.ClientConn) error { return wrong(conn, "unknown", codes.NotFound) }},
		{"too large", func(conn *grpc.ClientConn) error { return wrong(conn, "huge", codes.ResourceExhausted) }},
		{"200 at a time", many},
		{"keepalive", func(conn *grpc.ClientConn) error { return answered(conn, "idle") }},
		{"front end killed", killed},
		{"drained", drained},
	}
	for _, each := range checks {
		problem := ""
		if err := each.check(conn); err != nil {
			problem = err.Error()
		}
		say(map[string]string{"check": each.name, "problem": problem})
	}
}
